"""How a runner's passes are executed, beyond the kind of attention."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from specdec.attention import OPAQUE
from specdec.errors import UserError
from specdec.kernels import support

KERNELS = ("torch", "triton")


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """Choices that change how fast a pass is, not what it computes (up to rounding).

    Attributes:
        graphs: a value of ``specdec.models.static.Graphs``.
        kernels: "torch", or "triton" for fused norm + projections and norm + SwiGLU.
        compile: whether the forward goes through ``torch.compile``.
    """

    graphs: str = "off"
    kernels: str = "torch"
    compile: bool = False


PLAIN = Execution()


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Makes ``device`` the current one: Triton and graphs go there, whatever their operands."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def prepare(
    model: PreTrainedModel, execution: Execution, device: torch.device, dtype: torch.dtype
) -> Callable[..., Any]:
    """The forward to be called; ``model``, a runner's own copy, gets its fused modules.

    Raises:
        UserError: for an unknown choice, kernels or a compiler that cannot run here, or a family
            without fused modules.
    """
    if execution.kernels not in KERNELS:
        raise UserError(
            f"model.kernels={execution.kernels} is unknown; choose {', '.join(KERNELS)}"
        )
    if execution.kernels == "triton":
        support.require(support.triton_problem(device, dtype), "model.kernels=triton")
        from specdec.kernels.modules import fuse

        fuse(model)
    if not execution.compile:
        return model
    support.require(support.compile_problem(device), "model.compile=true")
    model.set_attn_implementation(OPAQUE)
    # Row counts vary between passes that are not captured; captured ones have few shapes each.
    compiled: Callable[..., Any] = torch.compile(model, dynamic=None)
    return compiled
