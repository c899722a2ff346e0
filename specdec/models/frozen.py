"""Whole-sequence passes of a frozen model of any family, with access to its layers.

A single layer, or the final norm and output head alone, run by transformers' own forward in a copy
of the module tree whose list of layers is cut. Gradients pass through; the model itself gets none.

Shape letters: B sequences, S positions, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.models.slicing import final_norm, keep_layers, layers_name, shared_copy


class FrozenModel(nn.Module):
    """A model whose weights do not change, and its parts; products run in ``compute_dtype`` by
    torch.autocast.
    """

    def __init__(
        self, model: PreTrainedModel, *, compute_dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.model = model.requires_grad_(False).eval()
        self.config = model.config.get_text_config()
        self.layers = list(model.get_submodule(layers_name(model)))  # type: ignore[arg-type]
        self.num_layers = len(self.layers)
        self.hidden_size: int = self.config.hidden_size
        self.vocab_size: int = self.config.vocab_size
        self.norm = final_norm(model)
        self.compute_dtype = compute_dtype
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
        """Returns residual streams, float32[B, S, E], after these numbers of layers and after all
        (before the norm).
        """
        streams: dict[int, Tensor] = {}
        numbers = {*after, self.num_layers}
        hooks = [
            self.layers[number - 1].register_forward_hook(partial(_keep, streams, number))
            for number in numbers
        ]
        try:
            with self.autocast():
                self.model.base_model(input_ids=tokens_BS, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        place = tokens_BS.device  # layers may be on several devices
        return {number: streams[number].to(place).float() for number in sorted(numbers)}

    def logits(self, x_BSE: Tensor) -> Tensor:
        """Returns logits, float32[B, S, V], of the residual stream after the last layer."""
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
        found: dict[int, Tensor] = {}
        self._layers[0] = layer
        hooks = (
            layer.register_forward_pre_hook(partial(_feed, x_BSE), with_kwargs=True),
            layer.register_forward_hook(partial(_keep, found, 0)),
        )
        try:
            self._model.base_model(input_ids=_blank(x_BSE), use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        return found[0]


def _blank(x_BSE: Tensor) -> Tensor:
    """Returns token ids whose embeddings are never read."""
    return torch.zeros(x_BSE.shape[:2], dtype=torch.long, device=x_BSE.device)


def _keep(found: dict[int, Tensor], number: int, _: nn.Module, __: Any, output: Any) -> None:
    found[number] = output[0] if isinstance(output, tuple) else output


def _feed(x_BSE: Tensor, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args:
        return (x_BSE, *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": x_BSE}
