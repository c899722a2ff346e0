"""Shapes of the timed Llama models, with random weights, and the bytes of a pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a Llama model."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    tied: bool

    def weight_bytes(self, itemsize: int) -> int:
        """Bytes of weights that a pass of few rows reads: all without the embedding."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        norms = 2 * self.hidden
        layer = attention + 3 * self.hidden * self.inner + norms
        return (self.layers * layer + self.hidden + self.vocab * self.hidden) * itemsize

    def cache_bytes(self, context: int, itemsize: int) -> int:
        """Bytes of keys and values that a pass over ``context`` tokens reads."""
        return 2 * self.layers * self.kv_heads * self.head_dim * context * itemsize


LLAMA3_1B = Shape(
    name="llama3-1b", layers=16, hidden=2048, heads=32, kv_heads=8, head_dim=64, inner=8192,
    vocab=128256, tied=True,
)  # fmt: skip
LLAMA3_3B = Shape(
    name="llama3-3b", layers=28, hidden=3072, heads=24, kv_heads=8, head_dim=128, inner=8192,
    vocab=128256, tied=True,
)  # fmt: skip
LLAMA3_8B = Shape(
    name="llama3-8b", layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, inner=14336,
    vocab=128256, tied=False,
)  # fmt: skip
LLAMA2_7B = Shape(
    name="llama2-7b", layers=32, hidden=4096, heads=32, kv_heads=32, head_dim=128, inner=11008,
    vocab=32000, tied=False,
)  # fmt: skip
SMOKE_TARGET = Shape(
    name="smoke-target", layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, inner=48,
    vocab=4096, tied=False,
)  # fmt: skip
SMOKE_DRAFT = Shape(
    name="smoke-draft", layers=1, hidden=16, heads=2, kv_heads=1, head_dim=8, inner=24,
    vocab=4096, tied=True,
)  # fmt: skip

FULL = (LLAMA3_8B, LLAMA3_3B, LLAMA3_1B, LLAMA2_7B)


def llama_config(shape: Shape, **more: Any) -> LlamaConfig:
    """The configuration of a shape; ``more`` are further arguments of ``LlamaConfig``."""
    return LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=shape.tied,
        **more,
    )


def random_llama(
    shape: Shape, *, device: str, dtype: torch.dtype, positions: int
) -> LlamaForCausalLM:
    """A model of a shape, weights drawn by transformers' own initialisation, on the device."""
    config = llama_config(shape, max_position_embeddings=positions, rope_theta=500000.0)
    config._attn_implementation = "sdpa"
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.random.fork_rng(), torch.device(device):
            torch.manual_seed(0)
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model.generation_config.eos_token_id = None
    return model.requires_grad_(False).eval()
