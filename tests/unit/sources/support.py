"""A tiny draft model and requests."""

from __future__ import annotations

from functools import partial

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.certify.contracts import commit, expand, open_request
from specdec.clocks.meter import Meter
from specdec.models.execution import Execution
from specdec.models.runner import ModelRunner
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
) -> LlamaForCausalLM:
    """Two random layers in float64; next tokens vary with the context."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden_size,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=max_positions,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).double().eval().requires_grad_(False)


def make_runner(model: LlamaForCausalLM, name: str = "draft") -> ModelRunner:
    return ModelRunner(model=model, name=name, meter=Meter())


def make_onnx_runner(*, max_positions: int = 256) -> ModelRunner:
    """A draft in ONNX Runtime, which needs float32 and heads of a multiple of 16."""
    model = tiny_model(max_positions=max_positions, hidden_size=32).float()
    onnx = Execution(backend="onnx")
    return ModelRunner(model=model, name="draft", meter=Meter(), execution=onnx)


make_state = new_state
make_request = partial(new_request, max_new_tokens=200)
