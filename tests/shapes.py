"""A Llama that tests save, read and run in milliseconds, and runners of models."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from specdec.clocks.meter import Meter
from specdec.models.random import random_model
from specdec.models.runner import ModelRunner


def saved_llama(folder: Path, num_layers: int, *, seed: int = 1) -> PreTrainedModel:
    """48 tokens, 64 positions, width 32."""
    sizes = {"vocab_size": 48, "max_positions": 64, "num_heads": 2, "num_kv_heads": 1}
    model = random_model(num_layers=num_layers, seed=seed, **sizes)
    model.save_pretrained(folder)
    return model


def runner_of(model: PreTrainedModel, **keys: Any) -> ModelRunner:
    """The model as the target; further arguments of the runner in ``keys``."""
    return ModelRunner(model=model, name="target", meter=Meter(), **keys)


def stages_of(model: PreTrainedModel, cuts: Sequence[int], **keys: Any) -> list[ModelRunner]:
    """Runners of the model's layers between one cut and the next."""
    return [runner_of(model, first_layer=a, last_layer=b, **keys) for a, b in pairwise(cuts)]
