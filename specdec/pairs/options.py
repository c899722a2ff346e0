"""Options of Hugging Face pairs: their types, and which ones change how a pass is computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from specdec.errors import UserError
from specdec.parts.fields import expects

Dtype = Literal["float64", "float32", "bfloat16", "float16"]
OwnDtype = Literal["auto", "float64", "float32", "bfloat16", "float16"]
"""``Dtype``, or auto: the checkpoint's own on CUDA devices, float32 on others."""

Device = Annotated[
    str,
    Field(pattern=r"^(auto|cpu|mps|cuda(:[0-9]+)?)$"),
    expects("it must be auto, cpu, mps, cuda or cuda:NUMBER"),
]
AttentionName = Literal["auto", "dense", "two_level", "triton", "flash", "flex"]
GraphsName = Literal["off", "auto", "cuda", "replay"]
KernelsName = Literal["torch", "triton", "packed"]
QuantizationName = Literal["none", "int8", "int4"]
BackendName = Literal["eager", "onnx", "auto"]
ExitHeadName = Literal["norm", "transformer"]

_PLAIN = {
    "attention": ("auto", "dense"),
    "graphs": ("off",),
    "kernels": ("torch",),
    "compile": (False,),
    "quantization": ("none",),
    "exact": (False,),
}
"""Option -> values with which a pass is PyTorch's own, with dense attention."""


def special_options(**options: Any) -> list[str]:
    """``NAME=VALUE`` of the options with which a pass is computed in another way."""
    return [
        f"{name}={str(value).lower()}"
        for name, value in options.items()
        if value not in _PLAIN[name]
    ]


def refuse_inexact(special: Sequence[str], backend: str) -> None:
    """Refuses what cannot be used with ``model.exact=true``.

    Args:
        special: see ``special_options``.
        backend: value of ``model.backend``.

    Raises:
        UserError: with the first such option.
    """
    chosen = [option for option in special if option != "exact=true"]
    chosen += ["backend=onnx"] if backend == "onnx" else []
    for option in chosen:
        name = option.partition("=")[0]
        plain = "eager" if name == "backend" else str(_PLAIN[name][0]).lower()
        raise UserError(
            f"model.{option} is not proved to give a row the same bits in every pass, which"
            f" model.exact=true needs: use model.{name}={plain}, or model.exact=false"
        )


def onnx_or_eager(wanted: str, reasons: Sequence[str | None], special: Sequence[str]) -> str:
    """Whether ``model.backend=onnx``, or auto, runs in ONNX Runtime ("onnx") or not ("eager").

    Args:
        wanted: onnx or auto.
        reasons: why a model cannot run there; None for one that can.
        special: see ``special_options``.

    Raises:
        UserError: "onnx" cannot be used.
    """
    found = [*reasons, *(f"it has no model.{option}" for option in special)]
    reason = next(filter(None, found), None)
    if reason is not None and wanted == "onnx":
        raise UserError(f"model.backend=onnx cannot be used: {reason}; use model.backend=eager")
    return "onnx" if reason is None else "eager"
