"""Small untrained pairs, for tests of equality."""

from __future__ import annotations

from functools import cached_property, partial
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import nn
from transformers import PreTrainedModel

from specdec.errors import UserError
from specdec.models.quantize import Quantization, quantize
from specdec.models.random import random_model, window_options
from specdec.pairs.huggingface import (
    AttentionName,
    Device,
    Dtype,
    ExitHeadName,
    GraphsName,
    HuggingFacePair,
    KernelsName,
    QuantizationName,
)
from specdec.parts.fields import Count, Index, Text, validated
from specdec.types import IntArray


class RandomPair(HuggingFacePair):
    """Small models with random weights and no end tokens, for tests of equality."""

    @validated
    def __init__(
        self,
        *,
        family: Text = "llama",
        num_layers: Count = 4,
        draft_layers: Count = 1,
        middle_layers: Count | None = None,
        hidden_size: Annotated[int, Field(ge=8)] = 32,
        num_heads: Count = 4,
        vocab_size: Annotated[int, Field(ge=2)] = 64,
        max_positions: Annotated[int, Field(ge=2)] = 512,
        sliding_window: Count | None = None,
        seed: Index = 0,
        logit_scale: float = 1.0,
        logit_step: float = 0.0,
        dtype: Dtype = "float64",
        device: Device = "cpu",
        attention: AttentionName = "auto",
        graphs: GraphsName = "off",
        kernels: KernelsName = "torch",
        compile: bool = False,
        quantization: QuantizationName = "none",
        exit_layer: Count | None = None,
        exit_head: ExitHeadName = "norm",
    ) -> None:
        """Describes the models; they are created on first use.

        Args:
            family, num_layers: of the target; a family as transformers names it (llama, gpt2, ...).
            draft_layers, middle_layers: of the draft and of the middle model, which are the
                target's first layers; None: no middle model.
            hidden_size, num_heads, vocab_size, max_positions: shapes.
            sliding_window: keys this many positions back are masked; None: the family's default.
            seed: of the weights.
            logit_scale: factor of both models' logits; a larger one sharpens the distributions.
            logit_step: logits are rounded to multiples of it, for ties; 0: no rounding.
            dtype, ..., exit_head: see ``HuggingFacePair``. Exit heads are untrained.

        Raises:
            UserError: layers, heads or a window that the target cannot have.
        """
        super().__init__(
            dtype=dtype,
            device=device,
            attention=attention,
            graphs=graphs,
            kernels=kernels,
            compile=compile,
            quantization=quantization,
            exit_layer=exit_layer,
            exit_head=exit_head,
        )
        self._layers = _layers(num_layers, draft_layers, middle_layers)
        sizes = _sizes(hidden_size, num_heads, vocab_size, max_positions)
        self._make_model = partial(
            random_model, family, seed=seed, dtype=self.dtype, device=self.device, **sizes
        )
        self._window = None if sliding_window is None else (family, sliding_window)
        self._options(num_layers)  # refused before models are made
        self._logits = (logit_scale, logit_step)

    @cached_property
    def target(self) -> PreTrainedModel:
        """The target model."""
        return quantize(self._make(self._layers["target"]), self._quantization)

    @cached_property
    def draft(self) -> PreTrainedModel:
        """The target's first layers: often right, often not."""
        return self._first_layers("draft")

    @cached_property
    def middle(self) -> PreTrainedModel:
        """The target's first layers, another number of them."""
        return self._first_layers("middle") if "middle" in self.names else super().middle

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the models that are configured."""
        return tuple(self._layers)

    def _first_layers(self, name: str) -> PreTrainedModel:
        model = self._make(self._layers[name])
        exact = self._quantization == Quantization.NONE
        whole = self.target if exact else self._make(self._layers["target"])
        model.load_state_dict(whole.state_dict(), strict=False)
        return quantize(model, self._quantization)

    def token_samples(self) -> IntArray:
        """Greedy continuations of the draft."""
        return self._samples

    def _options(self, num_layers: int) -> dict[str, Any]:
        """Further entries of the family's config."""
        return {} if self._window is None else window_options(*self._window, num_layers)

    def _make(self, num_layers: int) -> PreTrainedModel:
        model = self._make_model(num_layers=num_layers, options=self._options(num_layers))
        scale, step = self._logits
        if self._logits != (1.0, 0.0):

            def rescale(_: nn.Module, _args: Any, logits: torch.Tensor) -> torch.Tensor:
                return torch.round(logits * scale / step) * step if step else logits * scale

            model.get_output_embeddings().register_forward_hook(rescale)
        return model

    @cached_property
    def _samples(self) -> IntArray:
        starts = torch.arange(1, min(self.vocab_size, 33), device=self.device)[:, None]
        with torch.inference_mode():
            tokens = self.draft.generate(
                starts, max_new_tokens=32, do_sample=False, pad_token_id=0, eos_token_id=None
            )
        separated = torch.nn.functional.pad(tokens, (0, 1), value=0)
        return separated.flatten().cpu().numpy()  # type: ignore[no-any-return]


def _sizes(hidden_size: int, num_heads: int, vocab_size: int, max_positions: int) -> dict[str, Any]:
    """Shapes of target and draft: half as many key/value heads as heads if those are even."""
    if hidden_size % num_heads:
        raise UserError(
            f"model.hidden_size={hidden_size} must be a multiple of model.num_heads={num_heads}"
        )
    return {
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "num_kv_heads": num_heads if num_heads % 2 else num_heads // 2,
        "vocab_size": vocab_size,
        "max_positions": max_positions,
    }


def _layers(num_layers: int, draft: int, middle: int | None) -> dict[str, int]:
    """Name of each model -> its number of layers."""
    layers = {"target": num_layers, "draft": draft}
    if middle is not None:
        layers["middle"] = middle
    for name, number in layers.items():
        if not 1 <= number <= num_layers:
            raise UserError(
                f"model.{name}_layers={number} must be between 1 and model.num_layers={num_layers}"
            )
    return layers
