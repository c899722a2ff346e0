"""Checks whether ONNX Runtime can run the passes of a model (``model.backend=onnx``)."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from specdec.models.config_values import config_value

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Model families whose layers ``specdec.models.onnx.graph`` can write as an ONNX graph."""

_FAMILIES = ", ".join(sorted(FAMILIES))
_HEAD_SIZES = 16  # ONNX Runtime's rotary embeddings take multiples of it
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # tables of all positions exist
_PACKAGES = ("onnx", "onnxruntime")


def problem(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    """Returns why ``model.backend=onnx`` cannot run models of this ``config``; None if it can."""
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} cannot be imported: pip install {' '.join(missing)}"
    if device.type != "cpu":
        return f"it runs on a CPU only, and the models are on {device}"
    if dtype != torch.float32:
        return f"it computes in float32 only, not in {str(dtype).removeprefix('torch.')}"
    if config.model_type not in FAMILIES:
        return f"it has no graphs of {config.model_type} models, only of {_FAMILIES}"
    rope = config_value(config, "rope_parameters", {}).get("rope_type", "default")
    if rope not in _ROPE_TYPES:
        return f"rotary embeddings are {rope!r}, not one of {', '.join(_ROPE_TYPES)}"
    if config.hidden_act not in ("silu", "swish"):
        return f"the activation {config.hidden_act!r} is not silu"
    if head_size(config) % _HEAD_SIZES:
        return f"the head size {head_size(config)} is not a multiple of {_HEAD_SIZES}"
    return None


def head_size(config: PreTrainedConfig) -> int:
    size: int = config_value(config, "head_dim", config.hidden_size // config.num_attention_heads)
    return size
