"""Finds, copies and cuts the decoder layers of any transformers model; records their outputs."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from specdec.errors import UserError
from specdec.models.config_values import config_value
from specdec.types import HiddenName

if TYPE_CHECKING:
    from transformers import PreTrainedModel

K = TypeVar("K")

CACHE_ARGUMENTS = ("cache", "past_key_values")
"""Names of the cache argument and output of forwards: since transformers 5.24, before 5.24."""


def shared_copy(model: PreTrainedModel, shared: Iterable[nn.Module] = ()) -> PreTrainedModel:
    """Returns a copy of the module tree that shares all tensors, and the modules in ``shared``."""
    kept = chain(model.parameters(), model.buffers(), shared)
    return copy.deepcopy(model, {id(each): each for each in kept})


def layers_name(model: PreTrainedModel) -> str:
    num_layers = model.config.get_text_config().num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return name
    raise UserError(
        f"model type {model.config.model_type!r} has no list of {num_layers} decoder layers; "
        "use a decoder-only model with all layers in one list, such as llama, qwen3 or gpt2"
    )


def keep_layers(model: PreTrainedModel, first_layer: int, last_layer: int) -> nn.ModuleList:
    name, config = layers_name(model), model.config.get_text_config()
    layers: nn.ModuleList = model.get_submodule(name)[first_layer:last_layer]  # type: ignore[index]
    config.num_hidden_layers = len(layers)
    if config_value(config, "layer_types"):
        config.layer_types = list(config.layer_types[first_layer:last_layer])
    model.set_submodule(name, layers)
    return layers


def final_norm(model: PreTrainedModel, copied: PreTrainedModel | None = None) -> nn.Module:
    """Returns the norm before the output head of ``model`` or, if given, of its cut copy."""
    parent = (copied or model).get_submodule(layers_name(model).rpartition(".")[0])
    norms = [m for m in parent.children() if "norm" in type(m).__name__.lower()]
    if not norms:
        raise UserError(
            f"model type {model.config.model_type!r} has no norm after its layers, which an exit"
            " head needs; use another family"
        )
    return norms[-1]


def cache_argument(model: nn.Module) -> str:
    return _of_forward(type(model).forward)


@cache
def _of_forward(forward: Callable[..., Any]) -> str:
    parameters = inspect.signature(forward).parameters
    return next((name for name in CACHE_ARGUMENTS if name in parameters), CACHE_ARGUMENTS[-1])


@contextmanager
def recorded(modules: Mapping[K, nn.Module]) -> Iterator[dict[K, Tensor]]:
    """Yields a dictionary in which each module's latest output is stored inside the with block."""
    found: dict[K, Tensor] = {}
    hooks = [m.register_forward_hook(partial(_record, found, key)) for key, m in modules.items()]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _record(found: dict[Any, Tensor], key: Any, _: nn.Module, __: Any, output: Any) -> None:
    found[key] = first_of(output)


def first_of(output: Any) -> Tensor:
    """Returns the hidden states of a layer's output, which some families return in a tuple."""
    states: Tensor = output[0] if isinstance(output, tuple) else output
    return states


def with_hidden(hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the arguments (args, kwargs) of a layer's forward with ``hidden`` as its input."""
    if args:
        return (hidden, *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": hidden}


def hidden_states(
    target: PreTrainedModel, tokens: Tensor, names: Sequence[HiddenName]
) -> tuple[Tensor, Tensor]:
    """Runs transformers' own forward on ``tokens``, int64[B, T]; returns the states in ``names``,
    concatenated to [B, T, S], and the logits [B, T, V].
    """
    layers: Any = target.get_submodule(layers_name(target))
    modules = {name: final_norm(target) if name.normed else layers[name.layer] for name in names}
    with torch.no_grad(), recorded(modules) as found:
        logits = target(tokens, use_cache=False).logits
    streams = [found[name] for name in names]
    return torch.cat(streams, -1) if streams else logits[..., :0], logits
