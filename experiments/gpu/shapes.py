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


def shape_of(name: str, *sizes: int, tied: bool) -> Shape:
    """A shape of its sizes in the order of the class."""
    keys = ("layers", "hidden", "heads", "kv_heads", "head_dim", "inner", "vocab")
    return Shape(name=name, **dict(zip(keys, sizes, strict=True)), tied=tied)


LLAMA3_1B = shape_of("llama3-1b", 16, 2048, 32, 8, 64, 8192, 128256, tied=True)
LLAMA3_3B = shape_of("llama3-3b", 28, 3072, 24, 8, 128, 8192, 128256, tied=True)
LLAMA3_8B = shape_of("llama3-8b", 32, 4096, 32, 8, 128, 14336, 128256, tied=False)
LLAMA3_70B = shape_of("llama3-70b", 80, 8192, 64, 8, 128, 28672, 128256, tied=False)
LLAMA2_7B = shape_of("llama2-7b", 32, 4096, 32, 32, 128, 11008, 32000, tied=False)
SMOKE_TARGET = shape_of("smoke-target", 2, 32, 4, 2, 8, 48, 4096, tied=False)
SMOKE_DRAFT = shape_of("smoke-draft", 1, 16, 2, 1, 8, 24, 4096, tied=True)
TINY = shape_of("tiny", 4, 64, 4, 2, 16, 128, 20_000, tied=True)

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
