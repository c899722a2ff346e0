"""Exit heads of any transformers model: what turns an inner layer's hidden states into logits.

A norm head is a norm and an output matrix. A transformer head is a decoder layer of the target's
own kind, a norm and an output matrix (PPSD 5.3): for a runner it is the last layer of a model of
``layer`` + 1 layers, so it needs no code of its own for any family.

Shape letters: R rows, E hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel

from specdec.errors import UserError
from specdec.models.slicing import layers_name

KINDS = ("norm", "transformer")
"""Kinds of exit heads (``model.exit_head``)."""


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """An exit head as it lies in its file.

    Attributes:
        kind: a key of ``KINDS``.
        layer: layers of the target before it.
        tensors: ``norm.weight``, ``output.weight`` (absent: the target's own matrix) and, for a
            transformer head, ``layer.*`` under the target's own names.
    """

    kind: str
    layer: int
    tensors: Mapping[str, torch.Tensor]

    @classmethod
    def from_pair(cls, pair: Any, *, layer: int) -> HeadWeights:
        """The head after ``layer`` layers: trained if the pair has a folder, else untrained."""
        if pair.heads_folder is None:
            return own_head(pair.part(layer, pair.num_layers), pair.exit_head, layer)
        return read_head(pair.heads_folder, pair.exit_head, layer)

    @property
    def num_parameters(self) -> int:
        """Weights in the file."""
        return sum(tensor.numel() for tensor in self.tensors.values())


def read_head(folder: Path, kind: str, layer: int) -> HeadWeights:
    """Reads ``folder``/KIND-LAYER.safetensors.

    Raises:
        UserError: there is none, or it is not what its name says.
    """
    path = folder / f"{kind}-{layer}.safetensors"
    if not path.is_file():
        there = sorted(p.stem for p in folder.glob("*.safetensors")) if folder.is_dir() else []
        known = ", ".join(there) or "no heads there"
        raise UserError(
            f"model.exit_heads={folder.name} has no {path.name} ({known}): train it with"
            f" `specdec train exit_head 'heads=[{{kind: {kind}, layer: {layer}}}]'`, choose"
            " model.exit_layer and model.exit_head from those, or take an untrained head with"
            " model.exit_heads=null"
        )
    about, tensors = read_tensors(path)
    if (about.get("kind"), about.get("layer")) != (kind, str(layer)):
        raise UserError(
            f"{path.name} says that it is {about.get('kind')}-{about.get('layer')}; name it so"
        )
    return HeadWeights(kind, layer, tensors)


def read_tensors(path: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """What a head's file says about it, and its weights by name.

    Raises:
        UserError: it is damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return file.metadata() or {}, tensors
    except SafetensorError as error:
        raise UserError(f"{path.name} of model.exit_heads is damaged: {error}") from error


def own_head(target: PreTrainedModel, kind: str, layer: int) -> HeadWeights:
    """An untrained head: the target's final norm and output matrix, and its own next layer."""
    tensors = {f"norm.{n}": p for n, p in final_norm(target).named_parameters()}
    tensors["output.weight"] = target.get_output_embeddings().weight
    if kind == "transformer":
        block = target.get_submodule(layers_name(target))[layer]  # type: ignore[index]
        tensors |= {f"layer.{name}": p for name, p in block.named_parameters()}
    return HeadWeights(kind, layer, tensors)


def head_model(target: PreTrainedModel, head: HeadWeights) -> PreTrainedModel:
    """A model of ``head.layer`` + 1 layers whose last layer, norm and output are the head's.

    The other layers are the target's own (a norm head's last layer, too): nothing runs them, and
    nothing is copied.

    Args:
        target: whole, or loaded by ``load_stage``; it is not changed.
        head: of a layer below the target's last.

    Raises:
        UserError: the head's weights do not fit the target.
    """
    memo = {id(tensor): tensor for tensor in [*target.parameters(), *target.buffers()]}
    own = copy.deepcopy(target, memo)
    name, config = layers_name(own), own.config.get_text_config()
    layers = nn.ModuleList(list(own.get_submodule(name))[: head.layer + 1])  # type: ignore[arg-type]
    config.num_hidden_layers = len(layers)
    kinds = getattr(config, "layer_types", None)
    if kinds:
        config.layer_types = list(kinds[: len(layers)])
    own.set_submodule(name, layers)
    like = next(p for p in target.parameters() if not p.is_meta)
    parts = {"norm": final_norm(own), "layer": layers[-1]}
    for key, tensor in head.tensors.items():
        part, _, path = key.partition(".")
        tensor = tensor.to(like.device, like.dtype)
        module = own.get_output_embeddings() if part == "output" else parts[part]
        _put(module, path, tensor, f"{head.kind}-{head.layer}: {key}")
    return own


def final_norm(model: PreTrainedModel) -> nn.Module:
    """The norm between the last layer and the output head.

    Raises:
        UserError: for a family without one.
    """
    parent = model.get_submodule(layers_name(model).rpartition(".")[0])
    norms = [m for m in parent.children() if "norm" in type(m).__name__.lower()]
    if not norms:
        raise UserError(
            f"model type {model.config.model_type!r} has no norm after its layers that an exit head"
            " could start from; use another family"
        )
    return norms[-1]


def _put(module: nn.Module, path: str, tensor: torch.Tensor, label: str) -> None:
    """Replaces one parameter of an own instance (never its values, which others share)."""
    owner, _, leaf = path.rpartition(".")
    try:
        holder = module.get_submodule(owner)
        shape = holder.get_parameter(leaf).shape
    except AttributeError as error:
        raise UserError(f"exit head {label}: the target has no such weight ({error})") from error
    if shape != tensor.shape:
        raise UserError(
            f"exit head {label} has shape {tuple(tensor.shape)}, the target {tuple(shape)}; train"
            " the heads again for this target"
        )
    setattr(holder, leaf, nn.Parameter(tensor, requires_grad=False))
