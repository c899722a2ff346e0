"""Functions that return why Triton or flash-attn cannot run on a device, or None if it can."""

import os
from importlib import import_module
from importlib.util import find_spec

import torch

from specdec.errors import UserError

_HALF = (torch.float16, torch.bfloat16)


def triton_problem(device: torch.device | str, dtype: torch.dtype) -> str | None:
    if find_spec("triton") is None:
        return "Triton is not installed: pip install triton (Linux)"
    if dtype == torch.float64:
        return "the Triton kernels compute in float32, not in float64: choose another dtype"
    if torch.device(device).type == "cuda":
        return None
    if not interpreting():
        return (
            f"Triton has no backend for device {str(device)!r}: run on a CUDA device, or set"
            " TRITON_INTERPRET=1 to run the kernels slowly on the CPU"
        )
    if dtype != torch.float32:
        return f"Triton's interpreter supports float32 only, not {dtype}: choose dtype=float32"
    return None


def flash_problem(device: torch.device | str, dtype: torch.dtype) -> str | None:
    if find_spec("flash_attn") is None:
        return "flash-attn is not installed: pip install flash-attn (needs a CUDA toolkit)"
    if torch.device(device).type != "cuda":
        return f"flash-attn runs on CUDA devices, not on {str(device)!r}"
    if dtype not in _HALF:
        return f"flash-attn computes in float16 or bfloat16, not in {dtype}: choose another dtype"
    try:
        import_module("flash_attn")
    except ImportError as error:  # for example, built for another torch version
        return f"flash-attn cannot be imported ({error}): build it for torch {torch.__version__}"
    return None


def require(problem: str | None, setting: str) -> None:
    if problem is not None:
        raise UserError(f"{setting} cannot run here: {problem}")


def interpreting() -> bool:
    """Returns whether TRITON_INTERPRET is set: Triton interprets kernels defined from now on."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in {"1", "true", "on", "yes"}
