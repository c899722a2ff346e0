"""A tiny draft model and requests."""

from functools import partial

from transformers import PreTrainedModel

from specdec.clocks.meter import Meter
from specdec.models.execution import Execution
from specdec.models.random import random_model
from specdec.models.runner import ModelRunner
from specdec.testing.contracts import commit, expand, open_request
from tests.states import new_request, new_state

__all__ = [
    "VOCAB",
    "commit",
    "expand",
    "make_onnx_runner",
    "make_request",
    "make_runner",
    "make_state",
    "open_request",
    "tiny_model",
]

VOCAB = 32


def tiny_model(
    *, max_positions: int = 256, hidden_size: int = 16, seed: int = 0
) -> PreTrainedModel:
    """Two random layers in float64; next tokens vary with the context."""
    sizes = {"hidden_size": hidden_size, "vocab_size": VOCAB, "max_positions": max_positions}
    heads = {"num_heads": 2, "num_kv_heads": 1}
    return random_model(num_layers=2, dtype="float64", seed=seed, scale=0.5, **sizes, **heads)


def make_runner(model: PreTrainedModel, name: str = "draft") -> ModelRunner:
    return ModelRunner(model=model, name=name, meter=Meter())


def make_onnx_runner(*, max_positions: int = 256) -> ModelRunner:
    """A draft in ONNX Runtime, which needs float32 and heads of a multiple of 16."""
    model = tiny_model(max_positions=max_positions, hidden_size=32).float()
    onnx = Execution(backend="onnx")
    return ModelRunner(model=model, name="draft", meter=Meter(), execution=onnx)


make_state = new_state
make_request = partial(new_request, max_new_tokens=200)
