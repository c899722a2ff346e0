"""Exit heads of any transformers model, which compute logits from an inner layer's hidden states.

A norm head is a norm and an output matrix. A transformer head is a decoder layer of the target's
kind, a norm and an output matrix (PPSD 5.3); a runner treats it as the last layer of a model of
``layer`` + 1 layers, so no family needs specific code.

Shape letters: R rows, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.errors import UserError
from specdec.models.slicing import final_norm, keep_layers, layers_name, shared_copy


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """The weights of an exit head after ``layer`` layers of the target.

    Attributes:
        kind: "norm" or "transformer" (``model.exit_head``).
        tensors: ``norm.weight``, ``output.weight`` (default: the target's matrix) and, for a
            transformer head, ``layer.*`` with the target's parameter names.
    """

    kind: str
    layer: int
    tensors: Mapping[str, Tensor]

    @classmethod
    def from_pair(cls, pair: Any, *, layer: int) -> HeadWeights:
        """Returns the head after ``layer`` layers; untrained if the pair has no folder of heads."""
        if pair.heads_folder is None:
            return untrained_head(pair.part(layer, pair.num_layers), pair.options.exit_head, layer)
        return read_head(pair.heads_folder, pair.options.exit_head, layer)

    @property
    def num_parameters(self) -> int:
        return sum(tensor.numel() for tensor in self.tensors.values())


def read_head(folder: Path, kind: str, layer: int) -> HeadWeights:
    """Reads ``folder``/KIND-LAYER.safetensors."""
    path = folder / f"{kind}-{layer}.safetensors"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in folder.glob("*.safetensors"))) or "no heads"
        raise UserError(
            f"model.exit_heads={folder.name} has no {path.name} (available: {known}): train it with"
            f" `specdec train exit_head 'heads=[{{kind: {kind}, layer: {layer}}}]'`, choose"
            " model.exit_layer and model.exit_head from the available ones, or set"
            " model.exit_heads=null for an untrained head"
        )
    return HeadWeights(kind, layer, read_tensors(path, {"kind": kind, "layer": layer}))


def read_tensors(path: Path, expected: Mapping[str, object]) -> dict[str, Tensor]:
    """Reads a head's weights by name; its metadata, such as its kind, must equal ``expected``."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
    except SafetensorError as error:
        raise UserError(f"{path.name} of model.exit_heads is damaged: {error}") from error
    stored = {key: metadata.get(key) for key in expected}
    if stored != {key: str(value) for key, value in expected.items()}:
        name = "-".join(map(str, stored.values()))
        raise UserError(f"{path.name} of model.exit_heads contains the head {name}; rename it")
    return tensors


def untrained_head(target: PreTrainedModel, kind: str, layer: int) -> HeadWeights:
    """Combines the target's final norm, output matrix and next layer into an untrained head."""
    tensors = {f"norm.{n}": p for n, p in final_norm(target).named_parameters()}
    tensors["output.weight"] = target.get_output_embeddings().weight
    if kind == "transformer":
        block = target.get_submodule(layers_name(target))[layer]  # type: ignore[index]
        tensors |= {f"layer.{name}": p for name, p in block.named_parameters()}
    return HeadWeights(kind, layer, tensors)


def head_model(target: PreTrainedModel, head: HeadWeights) -> PreTrainedModel:
    """Returns a model of ``head.layer`` + 1 layers with the head's last layer, norm and output.

    The other layers, and a norm head's last layer, are the target's; they are shared and never run.
    ``target`` is not changed; it may be some layers of ``load_model`` only.
    """
    own = shared_copy(target)
    layers = keep_layers(own, 0, head.layer + 1)
    like = next(p for p in target.parameters() if not p.is_meta)
    parts = {"norm": final_norm(own), "layer": layers[-1]}
    for key, tensor in head.tensors.items():
        part, _, path = key.partition(".")
        if (tensor.device, tensor.dtype) != (like.device, like.dtype):
            # int8 weights cannot do this in inference mode.
            tensor = tensor.to(like.device, like.dtype)
        module = own.get_output_embeddings() if part == "output" else parts[part]
        _put(module, path, tensor, f"{head.kind}-{head.layer}: {key}")
    return own


def _put(module: nn.Module, path: str, tensor: Tensor, label: str) -> None:
    """Replaces one parameter of a private copy, whose values may be shared."""
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
