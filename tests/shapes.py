"""Sizes of models that tests train or save."""

from __future__ import annotations

from specdec.train.model import ModelShape


def small_llama(num_layers: int) -> ModelShape:
    """A Llama that is saved, read and run in milliseconds."""
    return ModelShape(
        num_layers=num_layers,
        hidden=32,
        feed_forward=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=48,
        max_positions=64,
    )
