"""How a runner's passes are executed, beyond the kind of attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from specdec.attention.kv_storage import Pair
from specdec.attention.tree_attention import OPAQUE, StepCache
from specdec.errors import UserError
from specdec.kernels import support

KERNELS = ("torch", "triton")


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """Choices that change how fast a pass is, not what it computes (up to rounding).

    Attributes:
        graphs: a value of ``specdec.device.Graphs``.
        kernels: "torch", or "triton" for fused norm + projections and norm + SwiGLU.
        compile: whether the forward goes through ``torch.compile``.
    """

    graphs: str = "off"
    kernels: str = "torch"
    compile: bool = False


PLAIN = Execution()


class OpaqueCache:
    """A ``StepCache`` for compiled models, which call it as one operation.

    Compiled code holds for the numbers that it has looked at, and each layer has its own.
    """

    is_compileable = False

    def __init__(self, cache: StepCache) -> None:
        """Passes everything on to ``cache``."""
        self._cache = cache

    @torch.compiler.disable
    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Pair:
        """See ``StepCache``."""
        return self._cache.update(key, value, layer_idx)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """See ``StepCache``."""
        return 0


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
        from specdec.kernels.fused_layers import fuse

        fuse(model)
    if not execution.compile:
        return model
    support.require(support.compile_problem(device), "model.compile=true")
    model.set_attn_implementation(OPAQUE)
    # Layers differ in a number of theirs: without this each is compiled anew, and beyond the
    # eighth none is.
    torch._dynamo.config.allow_unspec_int_on_nn_module = True
    # Row counts vary between passes that are not captured; captured ones have few shapes each.
    compiled: Callable[..., Any] = torch.compile(model, dynamic=None)
    return compiled
