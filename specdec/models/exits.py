"""Exit heads of any transformers model, which compute logits from an inner layer's hidden states.

A norm head has a norm and an output matrix. A transformer head (PPSD 5.3) also has a decoder layer
of the target's type before them; a ``ModelRunner`` runs only the last layer of its ``head_model``.

A head may predict only some tokens (a draft vocabulary): its output matrix has a row for each, and
its tensor ``output.ids`` their target ids. A head without an output matrix uses the target's.

Shape letters: R rows, E hidden size, V vocabulary, U draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from specdec.errors import UserError
from specdec.files import write_bytes
from specdec.models.slicing import final_norm, keep_layers, layers_name, shared_copy

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class HeadWeights:
    kind: str  # "norm" or "transformer" (``model.exit_head``)
    layer: int
    # ``norm.weight``, ``output.weight`` (default: the target's rows), ``output.ids`` (default: all
    # tokens) and, for a transformer head, ``layer.*`` with the target's parameter names
    tensors: Mapping[str, Tensor]

    @classmethod
    def from_pair(cls, pair: Any, *, layer: int) -> HeadWeights:
        if pair.heads_folder is None:
            return untrained_head(pair.part(layer, pair.num_layers), pair.options.exit_head, layer)
        return read_head(pair.heads_folder, pair.options.exit_head, layer)

    @property
    def num_parameters(self) -> int:
        return sum(tensor.numel() for tensor in self.tensors.values())


def read_head(folder: Path, kind: str, layer: int) -> HeadWeights:
    path = folder / f"{kind}-{layer}.safetensors"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in folder.glob("*.safetensors"))) or "no heads"
        raise UserError(
            f"model.exit_heads={folder.name} has no {path.name} (available: {known}): train it with"
            f" `specdec train exit head={kind} layers=[{layer}]`, choose"
            " model.exit_layer and model.exit_head from the available ones, or set"
            " model.exit_heads=null for an untrained head"
        )
    return HeadWeights(kind, layer, read_tensors(path, {"kind": kind, "layer": layer}))


VOCABULARY = "vocabulary.safetensors"


def read_tensors(path: Path, expected: Mapping[str, object]) -> dict[str, Tensor]:
    """Reads a head's tensors by name, with the folder's shared draft vocabulary if the head uses
    it; UserError unless the file's metadata has the entries ``expected``.
    """
    tensors, metadata = _read(path)
    stored = {key: metadata.get(key) for key in expected}
    if stored != {key: str(value) for key, value in expected.items()}:
        name = "-".join(map(str, stored.values()))
        raise UserError(f"{path.name} of model.exit_heads contains the head {name}; rename it")
    if metadata.get("reduced") == "True" and "output.ids" not in tensors:
        shared = path.with_name(VOCABULARY)
        if not shared.is_file():
            raise UserError(
                f"{path.name} of model.exit_heads needs {VOCABULARY}, which is missing: copy it"
                " from the folder in which the heads were trained"
            )
        tensors |= _read(shared)[0]
    return tensors


def _read(path: Path) -> tuple[dict[str, Tensor], Mapping[str, str]]:
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return tensors, file.metadata() or {}
    except SafetensorError as error:
        raise UserError(f"{path.name} of model.exit_heads is damaged: {error}") from error


def save_tensors(tensors: Mapping[str, Tensor], path: Path, about: Mapping[str, object]) -> None:
    """Writes a head's file, which ``read_tensors`` reads; ``about`` is its metadata: kind, layer,
    offset, and ``reduced`` (whether its output matrix has a draft vocabulary).
    """
    metadata = {"format": "pt"} | {key: str(value) for key, value in about.items()}
    write_bytes(path, save(dict(tensors), metadata=metadata))


def save_vocabulary(ids: Tensor, folder: Path) -> None:
    """Writes the draft vocabulary ``ids`` of all heads in ``folder``; UserError if it differs."""
    stored = {"output.ids": ids.int().cpu()}
    path = folder / VOCABULARY
    if path.is_file() and not torch.equal(_read(path)[0]["output.ids"], stored["output.ids"]):
        raise UserError(
            f"{path} is another draft vocabulary than that of these heads: give another output_dir,"
            " or train all heads of a folder from the same answers and output.vocabulary"
        )
    write_bytes(path, save(stored, metadata={"format": "pt"}))


class ReducedOutput(nn.Linear):
    """An output layer over the draft vocabulary ``ids``; all other tokens get the logit -inf."""

    ids: Tensor

    def __init__(self, weight: Tensor, ids: Tensor, vocab_size: int) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_buffer("ids", checked_ids(ids, vocab_size).to(weight.device))
        self.vocab_size = vocab_size

    def forward(self, hidden: Tensor) -> Tensor:
        return spread(F.linear(hidden, self.weight), self.ids, self.vocab_size)


def checked_ids(ids: Tensor, vocab_size: int) -> Tensor:
    ids = ids.long()
    if len(ids) and int(ids.max()) >= vocab_size:
        raise UserError(
            f"a head drafts token {int(ids.max())}, but the target has {vocab_size} tokens; train"
            " the heads again for this target"
        )
    return ids


def spread(logits: Tensor, ids: Tensor | None, vocab_size: int) -> Tensor:
    """Maps logits [.., U] of the tokens ``ids``, int64[U], to [.., V], with -inf for other tokens.

    If ``ids`` is None, returns the logits as they are.
    """
    if ids is None:
        return logits
    full = logits.new_full((*logits.shape[:-1], vocab_size), -torch.inf)
    return full.index_copy_(-1, ids, logits)


def untrained_head(target: PreTrainedModel, kind: str, layer: int) -> HeadWeights:
    tensors = {f"norm.{n}": p for n, p in final_norm(target).named_parameters()}
    tensors["output.weight"] = target.get_output_embeddings().weight
    if kind == "transformer":
        block = target.get_submodule(layers_name(target))[layer]  # type: ignore[index]
        tensors |= {f"layer.{name}": p for name, p in block.named_parameters()}
    return HeadWeights(kind, layer, tensors)


def head_model(target: PreTrainedModel, head: HeadWeights) -> PreTrainedModel:
    """Returns a model of ``head.layer`` + 1 layers with the head's last layer, norm and output.

    Layers that are not the head's (all layers for a norm head) are shared with ``target`` and
    never run, so ``target`` need not have all weights loaded.
    """
    own = shared_copy(target)
    layers = keep_layers(own, 0, head.layer + 1)
    like = next(p for p in target.parameters() if not p.is_meta)
    parts = {"norm": final_norm(own), "layer": layers[-1]}
    for key, tensor in head.tensors.items():
        part, _, path = key.partition(".")
        if key == "output.ids":
            continue
        if (tensor.device, tensor.dtype) != (like.device, like.dtype):
            # int8 weights cannot do this in inference mode.
            tensor = tensor.to(like.device, like.dtype)
        if key == "output.weight" and "output.ids" in head.tensors:
            size = own.config.get_text_config().vocab_size
            own.set_output_embeddings(ReducedOutput(tensor, head.tensors["output.ids"], size))
            continue
        module = own.get_output_embeddings() if part == "output" else parts[part]
        _put(module, path, tensor, f"{head.kind}-{head.layer}: {key}")
    return own


def _put(module: nn.Module, path: str, tensor: Tensor, label: str) -> None:
    """Sets parameter ``path`` to ``tensor``; UserError with ``label`` if the shapes differ."""
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
