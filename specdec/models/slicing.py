"""A slice of layers of any transformers model, on an own copy of the module tree.

transformers' own forward runs the slice: its list of layers is cut, embeddings that another stage
owns are replaced by nothing, and hooks put hidden states in and take them out. So no family needs
code of its own. All parameters are shared with the given model, which stays as it was.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.attention.tree_attention import IMPLEMENTATION, current_step
from specdec.errors import UserError
from specdec.models.shortcuts import shorten


class _Layers(nn.ModuleList):
    """A list of layers whose full slice is itself (forwards slice it on every call)."""

    def __getitem__(self, idx: Any) -> Any:
        if isinstance(idx, slice) and idx.indices(len(self)) == (0, len(self), 1):
            return self
        return super().__getitem__(idx)


class _NoEmbedding(nn.Module):
    """Stands for an embedding whose result would be overwritten anyway."""

    def __init__(self, layers: nn.Module) -> None:
        """Takes type and device of ``layers``: a stage's own embedding may be on no device."""
        super().__init__()
        like = next(layers.parameters())
        self.zero = torch.zeros(1, 1, 1, dtype=like.dtype, device=like.device)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.zero


def layers_name(model: PreTrainedModel) -> str:
    """Name of the list of decoder layers inside ``model``, such as "model.layers".

    Raises:
        UserError: if there is no such list.
    """
    num_layers = model.config.get_text_config().num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return name
    raise UserError(
        f"model type {model.config.model_type!r} has no list of {num_layers} decoder layers; "
        "only decoder-only models whose layers stand in one list are supported"
    )


def own_instance(
    model: PreTrainedModel, *, first_layer: int, last_layer: int, capture_layers: Iterable[int]
) -> PreTrainedModel:
    """A copy of the module tree that runs layers first .. last - 1 with our attention.

    Hooks on it serve the current ``AttentionStep``: they take the hidden states after the layers
    to capture and, in a slice that is not the first, put ``step.hidden`` in front.

    Args:
        model: whole, or loaded by ``load_stage``.
        first_layer, last_layer: the slice.
        capture_layers: global indices of layers in the slice.
    """
    shared = {id(t): t for t in chain(model.parameters(), model.buffers())}
    own = copy.deepcopy(model, dict(shared))
    own.eval()
    own.set_attn_implementation(IMPLEMENTATION)
    name = layers_name(own)
    layers = _Layers(list(own.get_submodule(name))[first_layer:last_layer])
    config = own.config.get_text_config()
    total = config.num_hidden_layers
    config.num_hidden_layers = len(layers)
    if len(getattr(config, "layer_types", None) or ()) == total:
        config.layer_types = list(config.layer_types[first_layer:last_layer])
    own.set_submodule(name, layers)
    if first_layer:
        for path, module in list(own.base_model.named_modules()):
            if isinstance(module, nn.Embedding) and not path.startswith(name):
                own.base_model.set_submodule(path, _NoEmbedding(layers))
        layers[0].register_forward_pre_hook(_put_hidden, with_kwargs=True)
    for index in capture_layers:
        layers[index - first_layer].register_forward_hook(_Capture(index))
    shorten(own)
    return own


class _Capture:
    """Forward hook that notes a layer's output in the current step."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __call__(self, _: nn.Module, args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        current_step().captured[self.index] = hidden


def _put_hidden(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook that replaces what the embeddings made by the step's hidden states."""
    hidden = current_step().hidden
    if args:
        return (hidden, *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": hidden}
