"""A Llama that tests save, read and run in milliseconds."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel

from specdec.models.random import random_model


def small_llama(num_layers: int, *, seed: int = 1) -> PreTrainedModel:
    """48 tokens, 64 positions, width 32."""
    sizes = {"vocab_size": 48, "max_positions": 64, "num_heads": 2, "num_kv_heads": 1}
    return random_model(num_layers=num_layers, seed=seed, **sizes)


def saved_llama(folder: Path, num_layers: int, *, seed: int = 1) -> PreTrainedModel:
    model = small_llama(num_layers, seed=seed)
    model.save_pretrained(folder)
    return model
