"""Chooses a slice's backend; modules of the others are not imported."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from specdec.attention import support
from specdec.attention.tree_attention import OPAQUE
from specdec.errors import UserError
from specdec.models.backends.eager import Eager
from specdec.models.backends.interface import Backend, ModelSlice
from specdec.models.execution import Execution

KERNELS = ("torch", "triton", "packed")
GRAPHS = ("off", "replay", "cuda", "auto")
"""``replay``: static buffers without graphs (any device); ``cuda``: as CUDA graphs; ``auto``:
``cuda`` on CUDA devices, else ``off``."""


def replace_modules(model: Any, execution: Execution, *, device: torch.device) -> None:
    """Replaces modules of a runner's own copy that has not run yet.

    Packing comes before the first pass, which would read the plain weights into memory.

    Raises:
        UserError: for an unknown option, or kernels that cannot run here.
    """
    kernels, dtype = execution.kernels, model.dtype
    if kernels not in KERNELS:
        raise UserError(f"model.kernels={kernels} is unknown; choose {', '.join(KERNELS)}")
    if execution.exact:
        backend_module("specdec.models.backends.exact").use_exact_modules(model)
    if kernels == "packed":
        packed = backend_module("specdec.kernels.packed")
        support.require(packed.packed_problem(device, dtype), "model.kernels=packed")
        if execution.compile:
            raise UserError("model.kernels=packed cannot be compiled: use model.compile=false")
        packed.pack(model)
    if kernels == "triton":
        support.require(support.triton_problem(device, dtype), "model.kernels=triton")
        backend_module("specdec.kernels.swiglu").use_swiglu(model)


def make_backend(layers: ModelSlice, attention: str, execution: Execution) -> Backend:
    """The backend of a slice whose modules have been replaced.

    Raises:
        UserError: for an unknown option, or a backend that cannot run this slice here.
    """
    eager = Eager(layers, attention, _forward(layers, execution))
    captures = _captures(execution.graphs, layers.spec.device)
    if execution.backend == "onnx":
        backend: Backend = backend_module("specdec.models.onnx.passes").Onnx(eager)
    elif execution.exact:
        backend = backend_module("specdec.models.backends.exact").Exact(eager)
    elif captures is not None:
        backend = backend_module("specdec.models.backends.graphs").Graphs(eager, captures=captures)
    else:
        backend = eager
    return backend


def backend_module(name: str) -> Any:
    """A module that only some runners need, some of which need packages that may be missing."""
    return import_module(name)


def _forward(layers: ModelSlice, execution: Execution) -> Callable[..., Any]:
    """The slice's model, or its compiled form."""
    if not execution.compile:
        return layers.model
    support.require(support.compile_problem(layers.spec.device), "model.compile=true")
    layers.model.set_attn_implementation(OPAQUE)
    # Layers differ in integer attributes: without this each layer is compiled separately, and
    # layers beyond torch's limit of eight are not compiled at all.
    torch._dynamo.config.allow_unspec_int_on_nn_module = True
    # Row counts vary between uncaptured passes; captured ones have few shapes.
    compiled: Callable[..., Any] = torch.compile(layers.model, dynamic=None)
    return compiled


def _captures(graphs: str, device: torch.device) -> bool | None:
    """Whether passes become CUDA graphs; None: passes have no static buffers."""
    if graphs not in GRAPHS:
        raise UserError(f"model.graphs={graphs} is unknown; choose {', '.join(GRAPHS)}")
    is_cuda = device.type == "cuda"
    if graphs == "cuda" and not is_cuda:
        raise UserError(
            f"model.graphs=cuda needs a CUDA device, but model.device is {device.type}; use"
            " model.graphs=off, or replay for the same buffers without graphs"
        )
    return None if graphs == "off" or (graphs == "auto" and not is_cuda) else graphs != "replay"
