"""Looking at a model folder before anything is loaded: quickly, and without torch.

Everything a user can get wrong about a model path ends here in one ``UserError`` that names the
value and the remedy, rather than minutes later in a worker's traceback.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.errors import UserError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]*(/[A-Za-z0-9][\w.\-]*)?")
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
CERTIFIED = frozenset(
    {
        *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "gpt2"),
        *("gpt_neox", "phi3", "olmo2", "opt", "gpt_bigcode", "starcoder2"),
    }
)
"""Families whose tree attention is tested against transformers' own forward."""

_CAUSAL = ("ForCausalLM", "LMHeadModel")  # ends of the names of causal language models
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_BITS = {
    **dict.fromkeys(["F64", "I64", "U64", "C64"], 64),
    **dict.fromkeys(["F32", "I32", "U32"], 32),
    **dict.fromkeys(["F16", "BF16", "I16", "U16"], 16),
    **dict.fromkeys(["I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"], 8),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What a model folder says about itself.

    Attributes:
        path: the local folder.
        model_type: transformers' name of the family, such as "llama".
        architecture: class that the checkpoint was saved from.
        num_layers, hidden_size, vocab_size, max_positions: sizes; 0 where the config is silent.
        dtype: as stored, such as "BF16"; the commonest where tensors differ.
        num_bytes: of all weights, as stored.
        tied: whether the output head shares the embeddings' weights.
        tensors: tensor name -> file name of the shard that holds it.
    """

    path: Path
    model_type: str
    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_positions: int
    dtype: str
    num_bytes: int
    tied: bool
    tensors: Mapping[str, str]


def inspect_model(path_or_id: str | Path) -> ModelInfo:
    """Checks that a model can be loaded, without loading it.

    Args:
        path_or_id: a folder in transformers' format, or the id of a Hugging Face repository, which
            is looked up (local hub cache, then network) only if there is no such folder.

    Raises:
        UserError: for a path that does not exist, a damaged or missing file, weights that are not
            safetensors, a model that needs its own code, or one that is not decoder-only.
    """
    folder = _folder(path_or_id)
    config = _json(folder / "config.json")
    architecture = _check_architecture(folder, config)
    headers = _headers(folder)
    text = config.get("text_config") or config
    return ModelInfo(
        path=folder,
        model_type=config["model_type"],
        architecture=architecture,
        num_layers=_size(text, "num_hidden_layers", "n_layer"),
        hidden_size=_size(text, "hidden_size", "n_embd"),
        vocab_size=_size(text, "vocab_size"),
        max_positions=_size(text, "max_position_embeddings", "n_positions"),
        dtype=_commonest_dtype(headers.values()),
        num_bytes=sum(_num_bytes(t) for header in headers.values() for t in header.values()),
        tied=bool(config.get("tie_word_embeddings", True)),
        tensors={name: file for file, header in headers.items() for name in header},
    )


def _folder(path_or_id: str | Path) -> Path:
    """The local folder of a path or hub id."""
    text = str(path_or_id)
    path = Path(path_or_id).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise UserError(f"model path {text!r} is a file; give the folder that holds config.json")
    if isinstance(path_or_id, Path) or not _HUB_ID.fullmatch(text):
        raise UserError(
            f"model path {text!r} does not exist; give a folder with config.json and safetensors "
            "weights, or a Hugging Face id such as 'Qwen/Qwen3-0.6B'"
        )
    return _hub_folder(text)


def _hub_folder(hub_id: str) -> Path:
    """Folder of a hub repository: from the local hub cache, else downloaded."""
    from huggingface_hub import snapshot_download

    try:
        cached = Path(snapshot_download(hub_id, local_files_only=True))
        if (cached / "config.json").is_file() and list(cached.glob("*.safetensors")):
            return cached
    except Exception:  # noqa: S110 - not in the cache: ask the network
        pass
    try:
        return Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES, etag_timeout=10))
    except Exception as error:  # the hub client raises a dozen kinds
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise UserError(
            f"model {hub_id!r} is no local folder, and the Hugging Face hub did not give it "
            f"({reason}); check the spelling, log in if it is gated, or give a local folder"
        ) from error


def _json(path: Path) -> dict[str, Any]:
    """A JSON object from a file."""
    if not path.is_file():
        raise UserError(
            f"{path.parent} has no {path.name}; give a folder in transformers' format "
            "(model.save_pretrained writes one)"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}); copy the file again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a JSON object; copy the file again")
    return content


def _check_architecture(folder: Path, config: dict[str, Any]) -> str:
    """Refuses what is no decoder-only family of transformers; returns the architecture."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise UserError(
            f"{folder / 'config.json'} names no model_type; use the config.json of a transformers "
            "model"
        )
    architecture = str((config.get("architectures") or [""])[0])
    if config.get("is_encoder_decoder"):
        raise UserError(
            f"{folder} is an encoder-decoder model ({model_type}); only decoder-only models such "
            "as llama, qwen3 or gpt2 can be decoded"
        )
    if model_type in CERTIFIED and architecture.endswith(_CAUSAL):
        return architecture
    # Other families: transformers knows, but asking it imports torch.
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if model_type not in known:
        if config.get("auto_map"):
            raise UserError(
                f"{folder} (model_type {model_type!r}) needs code of its own, and "
                "trust_remote_code is off in specdec; use a family that transformers includes"
            )
        raise UserError(
            f"{folder}: model_type {model_type!r} is not a causal language model of the installed "
            "transformers; use another model or a newer transformers"
        )
    names = known[model_type]
    allowed = (names,) if isinstance(names, str) else tuple(names)
    if architecture and architecture not in allowed:
        raise UserError(
            f"{folder} holds a {architecture}, not a causal language model "
            f"({' or '.join(allowed)}); save the language model alone, or use another checkpoint"
        )
    return architecture or allowed[0]


def _headers(folder: Path) -> dict[str, dict[str, Any]]:
    """File name -> tensor name -> entry of its safetensors header, all checked."""
    if (folder / _SINGLE).is_file():
        return {_SINGLE: read_header(folder / _SINGLE)}
    if not (folder / _INDEX).is_file():
        others = sorted(p.name for p in folder.iterdir() if p.suffix in {".bin", ".pt", ".gguf"})
        found = f" (only {', '.join(others[:3])})" if others else ""
        raise UserError(
            f"{folder} has no safetensors weights{found}, and no other format is read, because "
            "pickles can run code; convert them where you trust them: "
            "AutoModelForCausalLM.from_pretrained(...).save_pretrained(folder)"
        )
    index = _json(folder / _INDEX)
    shards: dict[str, str] = index.get("weight_map") or {}
    if not shards:
        raise UserError(f"{folder / _INDEX} maps no tensors; copy the file again")
    headers = {file: read_header(folder / file) for file in sorted(set(shards.values()))}
    for name, file in shards.items():
        if name not in headers[file]:
            raise UserError(
                f"{folder / file} lacks tensor {name!r} that the index promises; copy it again"
            )
    return headers


def read_header(path: Path) -> dict[str, Any]:
    """Tensor name -> {dtype, shape, data_offsets} of a safetensors file, checked against its size.

    Raises:
        UserError: for a file that is missing, cut short, or not safetensors.
    """
    if not path.is_file():
        raise UserError(f"weights file {path} is missing; copy the folder again")
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if start == b"version ":
            raise UserError(f"{path} is a git-lfs pointer, not weights; run 'git lfs pull'")
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise _damaged(path, f"header of {length} bytes in a file of {size}")
        raw = file.read(length)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        end = max((int(t["data_offsets"][1]) for t in header.values()), default=0)
        wrong = [
            name
            for name, t in header.items()
            if t["data_offsets"][1] - t["data_offsets"][0] != _num_bytes(t)
        ]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise _damaged(path, f"unreadable header: {error}") from error
    if end != size - 8 - length:
        raise _damaged(path, f"{size - 8 - length} bytes of weights where the header says {end}")
    if wrong:
        raise _damaged(path, f"tensor {wrong[0]!r} has a size that its shape does not")
    return header


def _damaged(path: Path, what: str) -> UserError:
    return UserError(
        f"{path} is damaged or no safetensors file ({what}); copy or download it again"
    )


def _num_bytes(tensor: dict[str, Any]) -> int:
    """Bytes of one header entry; types of other sizes than a byte multiple are taken as stated."""
    bits = _BITS.get(tensor["dtype"])
    if bits is None:
        return int(tensor["data_offsets"][1] - tensor["data_offsets"][0])
    return math.prod(tensor["shape"]) * bits // 8


def _commonest_dtype(headers: Iterable[dict[str, Any]]) -> str:
    totals: dict[str, int] = {}
    for header in headers:
        for tensor in header.values():
            totals[tensor["dtype"]] = totals.get(tensor["dtype"], 0) + _num_bytes(tensor)
    return max(totals, key=lambda dtype: totals[dtype], default="")


def _size(config: dict[str, Any], *names: str) -> int:
    return next((int(config[name]) for name in names if config.get(name)), 0)
