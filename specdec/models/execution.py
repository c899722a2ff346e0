"""Execution options of a runner: CUDA graphs, fused kernels, ``torch.compile``."""

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
from specdec.kernels.packed import pack, packed_problem

KERNELS = ("torch", "triton", "packed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """Options that change the speed of a pass, and its results by rounding at most.

    Attributes:
        graphs: a value of ``specdec.kernels.graphs.Graphs``.
        kernels: "torch"; "triton" for a fused SwiGLU; "packed" for weights in oneDNN's layout, on
            a CPU.
        compile: whether to compile the forward by ``torch.compile``.
        backend: "eager" for PyTorch, "onnx" for ONNX Runtime.
        exact: whether a row's bits must not depend on the other rows (``ExactPasses``).
    """

    graphs: str = "off"
    kernels: str = "torch"
    compile: bool = False
    backend: str = "eager"
    exact: bool = False


PLAIN = Execution()


class OpaqueCache(StepCache):
    """Wraps a ``StepCache`` for compiled models, which do not trace into ``update``.

    Traced, it would be specialised on every layer's index.
    """

    def __init__(self, cache: StepCache) -> None:
        """Forwards updates to ``cache``."""
        self._cache = cache

    @torch.compiler.disable
    def update(self, *args: Any, **kwargs: Any) -> Pair:
        return self._cache.update(*args, **kwargs)


def pack_weights(
    model: PreTrainedModel, execution: Execution, device: torch.device, dtype: torch.dtype
) -> None:
    """Packs the weights of a runner's own copy with ``kernels`` packed; else does nothing.

    Before the first pass: that would read the plain weights into memory.

    Raises:
        UserError: they cannot be packed here, or not with the other options.
    """
    if execution.kernels == "packed":
        support.require(packed_problem(device, dtype), "model.kernels=packed")
        if execution.compile:
            raise UserError("model.kernels=packed cannot be compiled: use model.compile=false")
        pack(model)


def prepare(
    model: PreTrainedModel, execution: Execution, device: torch.device, dtype: torch.dtype
) -> Callable[..., Any]:
    """Applies the options to ``model`` and returns the forward to call.

    Args:
        model: a runner's own copy, whose modules may be replaced by fused ones.
        execution: the options.
        device, dtype: of the model's weights.

    Raises:
        UserError: for an unknown option, or kernels or a compiler that cannot run here.
    """
    if execution.kernels not in KERNELS:
        raise UserError(
            f"model.kernels={execution.kernels} is unknown; choose {', '.join(KERNELS)}"
        )
    if execution.kernels == "triton":
        support.require(support.triton_problem(device, dtype), "model.kernels=triton")
        from specdec.kernels.swiglu import use_swiglu

        use_swiglu(model)
    if not execution.compile:
        return model
    support.require(support.compile_problem(device), "model.compile=true")
    model.set_attn_implementation(OPAQUE)
    # Layers differ in integer attributes: without this each layer is compiled separately, and
    # layers beyond torch's limit of eight are not compiled at all.
    torch._dynamo.config.allow_unspec_int_on_nn_module = True
    # Row counts vary between uncaptured passes; captured ones have few shapes.
    compiled: Callable[..., Any] = torch.compile(model, dynamic=None)
    return compiled
