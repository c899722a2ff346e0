"""Loads models, whole or by layers, and tokenizers; safetensors only, without remote code.

The first use of a model class makes transformers import all its models, which takes seconds.
Modules that cause it are imported in functions, so that wrong settings are refused first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakValueDictionary

import torch
import transformers
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import nn
from transformers.utils import logging

from specdec.errors import UserError
from specdec.models.config_values import config_value
from specdec.models.inspection import ModelInfo, inspect_model
from specdec.models.packing import num_bytes
from specdec.models.slicing import layers_name, shared_copy

if TYPE_CHECKING:
    from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

    from specdec.tensor_parallel.collective import Collective
    from specdec.tensor_parallel.cuts import Cut

DTYPES = {  # supported values of ``model.dtype``
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
Weights: TypeAlias = WeakValueDictionary[tuple[Any, ...], nn.Parameter]
"""Loaded parameters by file, tensor, tensor-parallel share, dtype and device. Pipeline stages with
layers in common use the same parameters; the memory is freed with the last such stage.
"""

_LOADING_ERRORS = (OSError, ValueError, RuntimeError, TypeError, ArithmeticError)
"""Exceptions that transformers raises for configurations and weights that it cannot use."""


def load_model(
    model: ModelInfo | str | Path,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    layers: tuple[int, int] | None = None,
    group: Collective | None = None,
    loaded_before: Weights | None = None,
) -> PreTrainedModel:
    """Loads a model, or some of its layers, in evaluation mode and without gradients.

    If ``layers`` is given, it reads tensors of layers first .. last - 1, the embeddings if first
    is 0, the output head if the last layer is included, and other parameters outside the layers
    (norms); the rest stays on the meta device. Give ``ModelRunner`` the result and the same layers.

    Args:
        model: a result of ``inspect_model``, or a path or id.
        dtype: a key of ``DTYPES``.
        layers: (first, last); None: the whole model, by transformers' own loader.
        group: tensor-parallel group, with ``layers`` only: linear layers get this rank's shares.
        loaded_before: with ``layers`` only: a cache of parameters; those in it are shared instead
            of read again, and newly read ones are added to it.
    """
    info = inspect_model(model)
    kind, where = torch_dtype(dtype), usable_device(device)
    config = _config(info)
    if layers is None:
        assert group is None, "shares are read by layers"
        loaded = _whole(info, config, kind).to(where)
        return loaded.requires_grad_(False).eval()
    if config_value(config, "quantization_config"):
        raise UserError(f"{info.path} is quantised; use a checkpoint with unquantised weights")
    loaded = _empty(info, config, kind)
    total = len(loaded.get_submodule(layers_name(loaded)))
    if not 0 <= layers[0] < layers[1] <= total:
        raise ValueError(f"layers {layers[0]} .. {layers[1]} are not in a model of {total} layers")
    tied = _tied_groups(loaded)
    cuts = {} if group is None else _share(loaded, group)
    sources = _sources(loaded, info, _needed_names(loaded, *layers), tied)
    weights = Weights() if loaded_before is None else loaded_before
    _fill(loaded, info, sources, cuts, weights, kind, where)
    for module in loaded.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(where))
    return loaded.requires_grad_(False).eval()


def _share(model: PreTrainedModel, group: Collective) -> dict[str, Cut]:
    # Not imported where no tensor is shared between devices.
    from specdec.tensor_parallel.sharding import shard_modules

    return shard_modules(model, group)


def sharded(model: PreTrainedModel, group: Collective) -> PreTrainedModel:
    """Returns a copy of a whole model with this rank's tensor-parallel shares of its weights."""
    share = shared_copy(model)
    whole = dict(share.named_parameters(remove_duplicate=False))
    for name, cut in _share(share, group).items():
        path, _, leaf = name.rpartition(".")
        part = nn.Parameter(cut.of(whole[name], whole[name].dtype), requires_grad=False)
        setattr(share.get_submodule(path), leaf, part)
    return share


def _whole(info: ModelInfo, config: AutoConfig, dtype: torch.dtype) -> PreTrainedModel:
    try:
        with _quiet():
            loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
                info.path,
                config=config,
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                attn_implementation=reference_attention(config),
                output_loading_info=True,
            )
    except _LOADING_ERRORS as error:
        raise UserError(
            f"{info.path} could not be loaded ({error}); check that config.json and the weights "
            "belong together"
        ) from error
    # transformers initialises missing tensors at random and only warns.
    _refuse_missing(info, sorted(report["missing_keys"]))
    model: PreTrainedModel = loaded
    return model


def weight_bytes(model: ModelInfo | str | Path, dtype: str, bits: int | None = None) -> int:
    """Returns the bytes that a model's weights take in memory, without loading them; tied weights
    count once. ``bits``: size per weight of linear layers in ONNX Runtime; None: as ``dtype``.
    """
    info = inspect_model(model)
    return num_bytes(_empty(info, _config(info), torch_dtype(dtype)), bits)


def end_tokens(model: ModelInfo | str | Path) -> frozenset[int]:
    info = inspect_model(model)
    config = _config(info).get_text_config()
    eos = config.eos_token_id
    if (info.path / "generation_config.json").is_file():
        eos = transformers.GenerationConfig.from_pretrained(
            info.path, local_files_only=True
        ).eos_token_id
    if eos is None:
        return frozenset()
    return frozenset(eos if isinstance(eos, list) else [eos])


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    try:
        return transformers.AutoTokenizer.from_pretrained(
            path, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # the type depends on the tokenizer
        raise UserError(
            f"{path} has no tokenizer that can be loaded ({error}); copy tokenizer.json and "
            "tokenizer_config.json beside the weights"
        ) from error


def _empty(info: ModelInfo, config: AutoConfig, dtype: torch.dtype) -> PreTrainedModel:
    try:
        with init_empty_weights(include_buffers=False):
            empty = transformers.AutoModelForCausalLM.from_config(
                config,
                dtype=dtype,
                trust_remote_code=False,
                attn_implementation=reference_attention(config),
            )
    except _LOADING_ERRORS as error:
        raise UserError(
            f"no model can be built from {info.path}/config.json ({error}); check its values"
        ) from error
    empty.tie_weights()
    return empty


def _tied_groups(model: PreTrainedModel) -> list[list[str]]:
    groups: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups[id(parameter)].append(name)
    return list(groups.values())


def _sources(
    model: PreTrainedModel, info: ModelInfo, needed: set[str], tied: list[list[str]]
) -> list[tuple[str, str, list[str]]]:
    prefix = f"{model.base_model_prefix}."  # checkpoints of a base model omit it
    stored_as = _stored_names(model, info)
    sources, missing = [], []
    for names in tied:
        aliases = (alias for name in names for alias in (name, name.removeprefix(prefix)))
        source = next((stored_as[alias] for alias in aliases if alias in stored_as), None)
        used = [name for name in names if name in needed]
        if used and source is not None:
            sources.append((info.tensors[source], source, used))
        else:
            missing += used[:1]
    _refuse_missing(info, missing)
    return sorted(sources, key=itemgetter(0))


def _fill(
    model: PreTrainedModel,
    info: ModelInfo,
    sources: list[tuple[str, str, list[str]]],
    cuts: Mapping[str, Cut],
    weights: Weights,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    for file, tensors in groupby(sources, key=itemgetter(0)):
        with safe_open(info.path / file, framework="pt", device=str(device)) as stored:
            for _, source, used in tensors:
                for name in used:
                    cut = cuts.get(name)
                    key = (str(info.path / file), source, cut, dtype, device)
                    parameter = weights.get(key)
                    if parameter is None:
                        if cut is None:
                            tensor = stored.get_tensor(source)
                        else:
                            tensor = cut.of(stored.get_slice(source), dtype)
                        parameter = nn.Parameter(tensor.to(device, dtype), requires_grad=False)
                        weights[key] = parameter
                    _put(model, name, parameter, info)


def _stored_names(model: PreTrainedModel, info: ModelInfo) -> dict[str, str]:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    renamings = [m for m in get_model_conversion_mapping(model) if isinstance(m, WeightRenaming)]
    names = {}
    for stored in info.tensors:
        name = stored
        for renaming in renamings:
            name, _ = renaming.rename_source_key(name)
        names[name] = stored
    return names


def _needed_names(model: PreTrainedModel, first_layer: int, last_layer: int) -> set[str]:
    layers = layers_name(model)
    total = len(model.get_submodule(layers))
    base = model.base_model
    in_base = {id(module) for module in base.modules()}
    needed = set()
    for path, module in model.named_modules():
        if path.startswith(f"{layers}."):
            used = first_layer <= int(path[len(layers) + 1 :].split(".")[0]) < last_layer
        elif id(module) not in in_base:
            used = last_layer == total
        elif isinstance(module, nn.Embedding):
            used = first_layer == 0
        else:
            used = True
        if used:
            needed |= {f"{path}.{name}" for name, _ in module.named_parameters(recurse=False)}
    return needed


def _put(model: PreTrainedModel, name: str, parameter: nn.Parameter, info: ModelInfo) -> None:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    expected = module.get_parameter(leaf).shape
    if expected != parameter.shape:
        raise UserError(
            f"{info.path}: tensor {name!r} has shape {tuple(parameter.shape)}, but config.json "
            f"implies {tuple(expected)}; use the config.json that belongs to the weights"
        )
    setattr(module, leaf, parameter)


def _refuse_missing(info: ModelInfo, names: list[str]) -> None:
    if names:
        raise UserError(
            f"{info.path} lacks {len(names)} tensors of its model, first {names[0]!r}; check that "
            "config.json and the weights belong together"
        )


def _config(info: ModelInfo) -> AutoConfig:
    try:
        return transformers.AutoConfig.from_pretrained(
            info.path, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # families validate their configs in different ways
        raise UserError(
            f"{info.path / 'config.json'} is not accepted by transformers ({error}); correct it"
        ) from error


def reference_attention(config: AutoConfig) -> str:
    return "eager" if config_value(config, "attn_logit_softcapping") else "sdpa"


def own_dtype(info: ModelInfo) -> str:
    own = config_value(_config(info), "dtype")
    names = [name for name, kind in DTYPES.items() if kind == (own or torch.float32)]
    if not names:
        raise UserError(
            f"{info.path} has weights of type {own}: choose model.dtype, one of {', '.join(DTYPES)}"
        )
    return names[0]


def torch_dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise UserError(f"dtype {name!r} is unknown; choose one of {', '.join(DTYPES)}")
    return DTYPES[name]


def usable_device(name: str) -> torch.device:
    """Returns the device of that name; a UserError if torch cannot allocate tensors on it."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].split(". ")[0]  # torch adds a page of hints
        raise UserError(
            f"model.device={name!r} cannot be used here ({reason}); use auto, cpu, or a device that"
            " torch reports as available"
        ) from error
    return device


@contextmanager
def _quiet() -> Iterator[None]:
    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()
