"""Checks a model folder before loading it, fast and without importing torch: every wrong path or
damaged folder raises a ``UserError`` that names the value and the remedy.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from specdec.errors import UserError
from specdec.files import parse_json
from specdec.models.bundled import family_path
from specdec.models.gguf import SUFFIX, unpacked

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]*(/[A-Za-z0-9][\w.\-]*)?")
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
CERTIFIED = frozenset(  # families whose tree attention is tested against transformers' own forward
    {
        *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "gpt2"),
        *("gpt_neox", "phi3", "olmo2", "opt", "gpt_bigcode", "starcoder2"),
    }
)
_CAUSAL = ("ForCausalLM", "LMHeadModel")  # suffixes of causal language models' class names
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_REMEDY = "give a folder in transformers' format (model.save_pretrained writes one)"
_TOO_LARGE = 1 << 40  # a larger size means that the file is damaged
_LFS = b"version "  # first bytes of a git-lfs pointer


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Properties of a model folder; sizes that its config omits are 0. ``tied``: the output head
    uses the embeddings' weights; ``has_mtp``: the config mentions multi-token-prediction layers;
    ``tensors`` maps the name of each tensor to the name of its file.
    """

    path: Path
    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_positions: int
    tied: bool
    has_mtp: bool
    tensors: Mapping[str, str]


def inspect_model(path_or_id: ModelInfo | str | Path, key: str = "model path") -> ModelInfo:
    """Checks a model without loading it; errors name it by ``key``. A ``ModelInfo`` is returned.

    A name that is no local path is taken as a Hugging Face id. UserError for damaged or missing
    files, formats other than safetensors and GGUF, custom code, models that are not decoder-only.
    """
    if isinstance(path_or_id, ModelInfo):
        return path_or_id
    folder = _folder(path_or_id, key)
    config = read_config(folder / "config.json", _REMEDY)
    _check_architecture(folder, config)
    text = config.get("text_config") or config
    where = folder / "config.json"
    if not isinstance(text, dict):
        raise UserError(f"{where} has a text_config that is no object; copy the file again")
    return ModelInfo(
        path=folder,
        model_type=config["model_type"],
        num_layers=_size(where, text, "num_hidden_layers", "n_layer"),
        hidden_size=_size(where, text, "hidden_size", "n_embd"),
        vocab_size=_size(where, text, "vocab_size"),
        max_positions=_size(where, text, "max_position_embeddings", "n_positions"),
        tied=bool(config.get("tie_word_embeddings", True)),
        has_mtp=any(value for key, value in text.items() if "mtp" in key or "nextn" in key),
        tensors=_tensor_files(folder),
    )


def inspect_pair(**names: str | None) -> dict[str, ModelInfo]:
    """Checks a target and its draft models without loading them; ``names`` are their paths by role.
    UserError if one, except ``translated``, has other token ids than the ``target``.
    """
    infos = {
        n: inspect_model(family_path(p, f"model.{n}"), f"model.{n}") for n, p in names.items() if p
    }
    target = infos["target"]
    for name, info in infos.items():
        if name in ("target", "translated"):
            continue
        if info.vocab_size != target.vocab_size:
            raise UserError(
                f"model.{name}={names[name]} has a vocabulary of {info.vocab_size} tokens and"
                f" model.target={names['target']} one of {target.vocab_size}: speculative decoding"
                f" needs the same; choose a {name} of the target's family"
            )
        files = [one.path / "tokenizer.json" for one in (target, info)]
        if all(f.is_file() for f in files) and files[0].read_bytes() != files[1].read_bytes():
            known, other = (Tokenizer.from_file(str(file)).get_vocab() for file in files)
            if known != other:
                raise UserError(
                    f"model.{name} ({info.path.name}) and model.target ({target.path.name}) number"
                    f" their tokens differently; give a {name} model trained with the target's"
                    " tokenizer, or name it model.translated for source=translated"
                )
    return infos


def _folder(path_or_id: str | Path, key: str) -> Path:
    text = str(path_or_id)
    path = Path(path_or_id).expanduser()
    if path.is_dir():
        files = sorted(path.glob(f"*{SUFFIX}"))
        if files and not (path / "config.json").exists():
            raise UserError(f"{key} {text!r} has no config.json; its GGUF is {files[0].name!r}")
        return path
    if path.is_file() and path.suffix == SUFFIX:
        return unpacked(path)
    if path.exists():
        raise UserError(
            f"{key} {text!r} is a file; give the folder that contains config.json, or a GGUF"
            f" file (model=gguf model.path=FILE{SUFFIX})"
        )
    if path.suffix == SUFFIX:
        raise UserError(f"{key} {text!r} does not exist; give a GGUF file that does")
    if isinstance(path_or_id, Path) or not _HUB_ID.fullmatch(text):
        raise UserError(
            f"{key} {text!r} does not exist; give a folder with config.json and safetensors "
            "weights, or a Hugging Face id such as 'Qwen/Qwen3-0.6B'"
        )
    if text.lower() in ("none", "null"):
        raise UserError(f"{key}={text} would be a Hugging Face id: write null for none")
    return _hub_folder(text, key)


def _hub_folder(hub_id: str, key: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        cached = Path(snapshot_download(hub_id, local_files_only=True))
        if (cached / "config.json").is_file() and list(cached.glob("*.safetensors")):
            return cached
    except Exception:  # noqa: S110 - not in the cache: download it
        pass
    try:
        return Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES, etag_timeout=10))
    except Exception as error:  # the hub client raises many types
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise UserError(
            f"{key} {hub_id!r} is not a local folder, and the Hugging Face hub did not provide it "
            f"({reason}); check the spelling, log in if it is gated, or give a local folder"
        ) from error


def read_config(path: Path, remedy: str) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"{path.parent} has no {path.name}; {remedy}")
    try:
        content = parse_json(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}); copy the file again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a JSON object; copy the file again")
    return content


def _check_architecture(folder: Path, config: dict[str, Any]) -> None:
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise UserError(
            f"{folder / 'config.json'} has no model_type; use the config.json of a transformers "
            "model"
        )
    architectures = config.get("architectures") or [""]
    if not isinstance(architectures, list):
        raise UserError(
            f"{folder / 'config.json'} has architectures that are no list; copy the file again"
        )
    architecture = str(architectures[0])
    if config.get("is_encoder_decoder"):
        raise UserError(
            f"{folder} is an encoder-decoder model ({model_type}); only decoder-only models such "
            "as llama, qwen3 or gpt2 can be decoded"
        )
    if model_type in CERTIFIED and architecture.endswith(_CAUSAL):
        return
    # Other families are looked up in transformers, whose import takes longer.
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if model_type not in known:
        if config.get("auto_map"):
            raise UserError(
                f"{folder} (model_type {model_type!r}) needs custom code, and "
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
            f"{folder} contains a {architecture}, not a causal language model "
            f"({' or '.join(allowed)}); save the language model alone, or use another checkpoint"
        )


def _tensor_files(folder: Path) -> dict[str, str]:
    if (folder / _SINGLE).is_file():
        return dict.fromkeys(_tensor_names(folder / _SINGLE), _SINGLE)
    if not (folder / _INDEX).is_file():
        others = sorted(p.name for p in folder.iterdir() if p.suffix in {".bin", ".pt", SUFFIX})
        only = f" (only {', '.join(others[:3])})" if others else ""
        raise UserError(
            f"{folder} has no safetensors weights{only}; name a GGUF file itself; no other format "
            "is supported, because pickles can run code; convert the weights where you trust them: "
            "AutoModelForCausalLM.from_pretrained(...).save_pretrained(folder)"
        )
    shards: dict[str, str] = read_config(folder / _INDEX, _REMEDY).get("weight_map") or {}
    if not (shards and isinstance(shards, dict) and all(type(v) is str for v in shards.values())):
        raise UserError(
            f"{folder / _INDEX} lists no tensors with the files that hold them; copy the file again"
        )
    names = {file: set(_tensor_names(folder / file)) for file in sorted(set(shards.values()))}
    for name, file in shards.items():
        if name not in names[file]:
            raise UserError(
                f"{folder / file} lacks tensor {name!r}, which the index lists; copy it again"
            )
    return shards


def _tensor_names(path: Path) -> list[str]:
    if not path.is_file():
        raise UserError(f"weights file {path} is missing; copy the folder again")
    with path.open("rb") as file:
        if file.read(len(_LFS)) == _LFS:
            raise UserError(f"{path} is a git-lfs pointer, not weights; run 'git lfs pull'")
    try:
        with safe_open(path, framework="numpy") as weights:
            return list(weights.keys())
    except SafetensorError as error:
        raise UserError(
            f"{path} is damaged or not a safetensors file ({error}); copy or download it again"
        ) from error


def _size(where: Path, config: dict[str, Any], *names: str) -> int:
    for name in names:
        value = config.get(name)
        if value is not None and not (type(value) is int and 0 <= value < _TOO_LARGE):
            raise UserError(
                f"{where} has {name}={json.dumps(value)[:40]}, which is no size: it must be a"
                " whole number; copy the file again"
            )
        if value:
            return int(value)
    return 0
