"""Whole-sequence passes of a frozen transformers model, with access to its layers.

To run a single layer, or only the final norm and output head, transformers' own forward runs on a
copy of the module tree that lacks the other layers. Gradients reach input states, not weights.

Shape letters: B sequences, S positions, E hidden size, V vocabulary.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.models.slicing import (
    final_norm,
    keep_layers,
    layers_name,
    recorded,
    shared_copy,
    with_hidden,
)


class FrozenModel(nn.Module):
    """A model whose weights do not change, with methods that run parts of it; matrix products run
    in ``compute_dtype`` under torch.autocast.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        compute_dtype: torch.dtype = torch.float32,
        keep_bytes: float = 0.0,
    ) -> None:
        """``keep_bytes``: bytes of host memory in which ``residuals`` caches results."""
        super().__init__()
        self.model = model.requires_grad_(False).eval()
        self.config = model.config.get_text_config()
        self.layers = list(model.get_submodule(layers_name(model)))  # type: ignore[arg-type]
        self.num_layers = len(self.layers)
        self.hidden_size: int = self.config.hidden_size
        self.vocab_size: int = self.config.vocab_size
        self.norm = final_norm(model)
        self.compute_dtype, self._room = compute_dtype, keep_bytes
        self._kept: dict[tuple[bytes, tuple[int, ...]], Tensor] = {}  # [K streams, S, E] of a text
        self._output = _Output(model)
        self._single: dict[int, _OneLayer] = {}  # layer number -> its model

    @property
    def device(self) -> torch.device:
        return self.model.device

    def autocast(self) -> torch.autocast:
        lower = self.compute_dtype != torch.float32
        return torch.autocast(self.device.type, dtype=self.compute_dtype, enabled=lower)

    def get_input_embeddings(self) -> Any:
        return self.model.get_input_embeddings()

    def get_output_embeddings(self) -> Any:
        return self.model.get_output_embeddings()

    def residuals(self, tokens_BS: Tensor, after: Collection[int] = ()) -> dict[int, Tensor]:
        """Maps n to the residual stream after n of the layers, float32[B, S, E], before the final
        norm, for each n in ``after`` and for the number of all layers.
        """
        numbers = tuple(sorted({*after, self.num_layers}))
        if not self._room and not self._kept:
            return dict(zip(numbers, self._residuals(tokens_BS, numbers), strict=True))
        keys = [(_text(row).numpy().tobytes(), numbers) for row in tokens_BS.cpu()]
        new = [row for row, key in enumerate(keys) if key not in self._kept]
        found = tokens_BS.new_zeros(
            (len(numbers), *tokens_BS.shape, self.hidden_size), dtype=torch.float32
        )
        if new:
            found[:, new] = torch.stack(self._residuals(tokens_BS[new], numbers))
        for row, key in enumerate(keys):
            length = len(key[0]) // 8
            if row not in new:
                found[:, row, :length] = self._kept[key].to(found)
                continue
            text = found[:, row, :length].to(self.compute_dtype).cpu()
            if (size := text.numel() * text.element_size()) <= self._room:
                self._kept[key] = text.clone()
                self._room -= size
        return dict(zip(numbers, found, strict=True))

    def _residuals(self, tokens_BS: Tensor, numbers: Sequence[int]) -> list[Tensor]:
        modules = {number: self.layers[number - 1] for number in numbers}
        with recorded(modules) as streams, self.autocast():
            self.model.base_model(input_ids=tokens_BS, use_cache=False)
        place = tokens_BS.device  # layers may be on several devices
        return [streams[number].to(place).float() for number in numbers]

    def logits(self, x_BSE: Tensor) -> Tensor:
        """Returns logits, float32[B, S, V], for the residual stream after the last layer."""
        with self.autocast():
            return self._output(x_BSE).to(x_BSE.device).float()

    def run_layer(self, layer: nn.Module, x_BSE: Tensor, number: int) -> Tensor:
        if number not in self._single:
            self._single[number] = _OneLayer(self.model, number)
        with self.autocast():
            return self._single[number].run(layer, x_BSE)


class _Output:
    def __init__(self, model: PreTrainedModel) -> None:
        self._model = shared_copy(model)
        keep_layers(self._model, 0, 0)
        self._norm = final_norm(model, self._model)

    def __call__(self, x_BSE: Tensor) -> Tensor:
        norm: Tensor = next(self._norm.parameters())
        x_BSE = x_BSE.to(norm.device, norm.dtype)
        hook = self._norm.register_forward_pre_hook(lambda _, args: (x_BSE, *args[1:]))
        try:
            logits: Tensor = self._model(input_ids=_blank(x_BSE), use_cache=False).logits
        finally:
            hook.remove()
        return logits


class _OneLayer:
    def __init__(self, model: PreTrainedModel, number: int) -> None:
        self._model = shared_copy(model)
        self._layers = keep_layers(self._model, number, number + 1)

    def run(self, layer: nn.Module, x_BSE: Tensor) -> Tensor:
        self._layers[0] = layer
        hook = layer.register_forward_pre_hook(
            lambda _, args, kwargs: with_hidden(x_BSE, args, kwargs), with_kwargs=True
        )
        try:
            with recorded({0: layer}) as found:
                self._model.base_model(input_ids=_blank(x_BSE), use_cache=False)
        finally:
            hook.remove()
        return found[0]


def _text(row_S: Tensor) -> Tensor:
    """Removes zeros (padding) at a row's end, except one, since a text may end with token 0."""
    ends = row_S.nonzero()
    return row_S[: int(ends[-1]) + 2 if len(ends) else 1]


def _blank(x_BSE: Tensor) -> Tensor:
    """Returns zeros [B, S] as token ids; hooks replace the hidden states computed from them."""
    return torch.zeros(x_BSE.shape[:2], dtype=torch.long, device=x_BSE.device)
