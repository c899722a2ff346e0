"""A pass that finds out how a model's layers attend."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from specdec.attention.tree_attention import ScoreOptions, Step
from specdec.errors import UserError

_IGNORED = frozenset(
    {"is_causal", "layer_idx", "output_attentions", "position_ids", "use_cache", "cache_position"}
)


class Probe(Step):
    """A step that records the shapes of keys and rejects unsupported attention arguments.

    Attributes:
        shapes: layer of the slice -> (G, D).
        options: layer of the slice -> how it computes its scores.
        num_heads: H.
        windowed: layers of the slice with a sliding window.
    """

    def __init__(self, *, model_type: str, first_layer: int, hidden: Tensor) -> None:
        super().__init__(first_layer=first_layer, hidden=hidden)
        self.shapes: dict[int, tuple[int, int]] = {}
        self.options: dict[int, ScoreOptions] = {}
        self.num_heads = 0
        self.windowed: set[int] = set()
        self._model_type = model_type

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: ScoreOptions) -> Tensor:
        """Returns zeros of the right shape."""
        unknown = [k for k, v in options.others.items() if k not in _IGNORED and v is not None]
        if unknown or key.shape != value.shape:
            raise UserError(
                f"model type {self._model_type!r} cannot be used: tree attention does not support "
                f"features of its attention ({', '.join(unknown) or 'unequal key and value'}); use "
                "a plain decoder-only family such as llama, qwen3 or gpt2"
            )
        self.shapes[self.cache.layer] = (key.shape[1], key.shape[3])
        self.options[self.cache.layer] = options
        self.num_heads = query.shape[1]
        if options.window is not None:
            self.windowed.add(self.cache.layer)
        return rearrange(torch.zeros_like(query), "b h r d -> b r h d")
