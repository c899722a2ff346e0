from collections.abc import Callable
from functools import cached_property, partial
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import nn
from transformers import PreTrainedModel

from specdec.errors import UserError
from specdec.models.eagle import EagleHead
from specdec.models.eagle_loading import fit_head
from specdec.models.random import random_model, window_options
from specdec.models.vocabulary import (
    TRANSLATED,
    Vocabulary,
    fast_tokenizer,
    other_tokenizer,
    simple_tokenizer,
    with_vocabulary,
)
from specdec.pairs.huggingface import H, HuggingFacePair
from specdec.pairs.options import Dtype, ModelOptions, with_flat_options
from specdec.parts.fields import Count, Index, Text, validated
from specdec.types import IntArray

_OPTIONS = ModelOptions(dtype="float64", device="cpu", exit_head="norm")


class RandomPair(HuggingFacePair):
    """Small models with random weights and no end tokens, for tests that decoding is lossless."""

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
        options: ModelOptions = _OPTIONS,
    ) -> None:
        """Describes the models; they are created on first use.

        Args:
            family: architecture, as transformers names it (llama, qwen3, gpt2, ...).
            num_layers, draft_layers, middle_layers: depths; draft and middle are the target's first
                layers.
            sliding_window: length of the attention window in positions; None: the family's default,
                which no short sequence reaches.
            logit_scale: factor of both models' logits; a larger one sharpens the distributions.
            logit_step: logits are rounded to its multiples, which makes ties frequent; 0: no
                rounding.
            options: options of all models; exit heads are untrained, and dtype=auto is float32.
        """
        super().__init__(options)
        if hidden_size % num_heads:
            raise UserError(
                f"model.hidden_size={hidden_size} must be a multiple of model.num_heads={num_heads}"
            )
        self._layers = {"target": num_layers, "draft": draft_layers}
        self._layers |= {} if middle_layers is None else {"middle": middle_layers}
        self.names = tuple(self._layers)
        for name, number in self._layers.items():
            if number > num_layers:
                raise UserError(
                    f"model.{name}_layers={number} must be between 1 and"
                    f" model.num_layers={num_layers}"
                )
        self._make_model = partial(
            random_model,
            family,
            seed=seed,
            dtype=self.dtype,
            device=self.device,
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_heads if num_heads % 2 else num_heads // 2,
            vocab_size=vocab_size,
            max_positions=max_positions,
        )
        self._family, self._window = family, sliding_window
        self._window_options(num_layers)  # refused before models are made
        self._logits = (logit_scale, logit_step)
        self._fitted: dict[str, Any] = {}

    def model_name(self, name: str) -> str:
        return f"random {self._family} of {self._layers[name]} layers"

    def new_model(self, name: str) -> PreTrainedModel:
        return self.quantised(self._created(name), name)

    def vocabulary(self, name: str) -> Vocabulary:
        described, size = simple_tokenizer(self.vocab_size), self.vocab_size
        if name != "target":
            described, size = self._other[0], len(self._other[1])
        return Vocabulary(fast_tokenizer(described), size=size, end=None, name=f"model={name}")

    @cached_property
    def _other(self) -> tuple[dict[str, Any], list[list[int]]]:
        described = simple_tokenizer(self.vocab_size)
        num = len(described["model"]["merges"])
        return other_tokenizer(described, merges=num - num // 4, joined=num // 4)

    def _created(self, name: str) -> PreTrainedModel:
        """Creates a model. Draft and middle model have the target's first layers, so that proposals
        are often right and often wrong. The draft with another tokenizer is the draft with other
        token ids, without some tokens and with new ones.
        """
        if name == TRANSLATED:
            return with_vocabulary(self._created("draft"), self._other[1])
        if name not in self._layers:
            return super().new_model(name)  # raises
        model = self._make(self._layers[name])
        if name != "target":
            rounded = self.options.bits_of("target") is not None
            target = self._created("target") if rounded else self.target
            model.load_state_dict(target.state_dict(), strict=False)
        return model

    def eagle_head(self, version: Literal[1, 3]) -> EagleHead:
        """Returns a head that is fitted to the target on first use, since an untrained one almost
        never proposes the right token.
        """
        return self.fitted(f"eagle {version}", partial(super().eagle_head, version), fit_head)[0]

    def fitted(
        self, name: str, make: Callable[[], H], fit: Callable[[H, Any], H]
    ) -> tuple[H, bool]:
        if name not in self._fitted:
            with torch.inference_mode(False):  # decoding runs in it, but a head is fitted
                self._fitted[name] = fit(make(), self.target)
        return self._fitted[name], True

    def _window_options(self, num_layers: int) -> dict[str, Any] | None:
        window = self._window
        return None if window is None else window_options(self._family, window, num_layers)

    def _make(self, num_layers: int) -> PreTrainedModel:
        with torch.inference_mode(False):  # decoding runs in it, but heads are fitted to this
            model = self._make_model(
                num_layers=num_layers, options=self._window_options(num_layers)
            )
        scale, step = self._logits
        if self._logits != (1.0, 0.0):

            def rescale(_: nn.Module, _args: Any, logits: torch.Tensor) -> torch.Tensor:
                return torch.round(logits * scale / step) * step if step else logits * scale

            model.get_output_embeddings().register_forward_hook(rescale)
        return model

    def token_samples(self) -> IntArray:
        """Returns int64[N]: greedy continuations by the draft model, each followed by token 0."""
        starts = torch.arange(1, min(self.vocab_size, 33), device=self.device)[:, None]
        with torch.inference_mode():
            tokens = self.draft.generate(
                starts, max_new_tokens=32, do_sample=False, pad_token_id=0, eos_token_id=None
            )
        separated = torch.nn.functional.pad(tokens, (0, 1), value=0)
        return separated.flatten().cpu().numpy()  # type: ignore[no-any-return]


build_random = with_flat_options(RandomPair, dtype=Dtype)
