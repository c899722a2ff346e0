"""Chooses a slice's backend, and imports no modules of the others."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from specdec.attention import support
from specdec.attention.tree_attention import OPAQUE
from specdec.errors import UserError
from specdec.models.backends.eager import Backend, Eager, ModelSlice
from specdec.models.execution import Execution

KERNELS = ("torch", "triton", "packed")
GRAPHS = ("off", "replay", "cuda", "auto")
"""``replay``: static buffers without graphs, on any device; ``auto``: ``cuda`` or else ``off``."""


def replace_modules(model: Any, execution: Execution, *, device: torch.device) -> None:
    """Replaces modules of a runner's own copy, which must not have run yet.

    Packing comes before the first pass, because that would read the plain weights into memory.
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
    """Returns the backend of a slice whose modules have been replaced."""
    eager = Eager(layers, attention, _forward(layers, execution))
    captures = _captures(execution.graphs, layers.spec.device)
    if execution.backend == "onnx":
        onnx = backend_module("specdec.models.onnx.passes")
        backend: Backend = onnx.Onnx(eager, execution.bits)
    elif execution.exact:
        backend = backend_module("specdec.models.backends.exact").Exact(eager)
    elif captures is not None:
        backend = backend_module("specdec.models.backends.graphs").Graphs(eager, captures=captures)
    else:
        backend = eager
    return backend


def backend_module(name: str) -> Any:
    """Imports a module that only some runners need, perhaps with packages that are missing here."""
    return import_module(name)


def _forward(layers: ModelSlice, execution: Execution) -> Callable[..., Any]:
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
    """Returns whether passes become CUDA graphs; None if passes use no static buffers at all."""
    if graphs not in GRAPHS:
        raise UserError(f"model.graphs={graphs} is unknown; choose {', '.join(GRAPHS)}")
    is_cuda = device.type == "cuda"
    if graphs == "cuda" and not is_cuda:
        raise UserError(
            f"model.graphs=cuda needs a CUDA device, but model.device is {device.type}; use"
            " model.graphs=off, or replay for the same buffers without graphs"
        )
    return None if graphs == "off" or (graphs == "auto" and not is_cuda) else graphs != "replay"
