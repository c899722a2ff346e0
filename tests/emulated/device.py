"""A CUDA device emulated in CPU memory, which rejects mixed devices and invalid graph captures.

Its tensors have the device ``cuda:0`` and wrap an ordinary tensor. Every operation goes through
``Device.__torch_dispatch__``, which rejects what CUDA rejects: operands on two devices and, during
capture, waiting for the device, copies from or to the host, and reading a value. A captured graph
is the list of operations on the tensors of the capture; a replay runs them again without Python on
the same memory. Replaying a graph overwrites the results of the other graphs of its pool with
garbage, since real graphs share that memory.

Memory that was allocated and not written holds NaN, or the largest number of an integer dtype, so
that reading it fails in every run.

Not emulated: streams, out of memory, speed, kernels (Triton's, flash-attn's), rounding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from time import perf_counter
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from specdec.clocks import timed_runs

HERE, CPU = torch.device("cuda", 0), torch.device("cpu")

WAITS = frozenset(
    {
        "_local_scalar_dense",
        "equal",
        "nonzero",
        "masked_select",
        "unique_dim",
        "_unique2",
        "unique_consecutive",
        "bincount",
    }
)
"""Operations whose result, or its shape, the host has to wait for."""

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_NO_FUSED_ATTENTION = 0


class DeviceTensor(torch.Tensor):
    """A tensor whose device is ``cuda:0``.

    For torch's C++ code it is a meta tensor, because a CUDA tensor needs a driver.

    Attributes:
        memory: the ordinary tensor with its values.
    """

    memory: torch.Tensor
    device = property(lambda _: HERE)  # type: ignore[assignment]
    is_cuda = property(lambda _: True)  # type: ignore[assignment]
    is_cpu = is_meta = property(lambda _: False)  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, memory: torch.Tensor) -> DeviceTensor:
        with torch.inference_mode(False):  # a view of an ordinary tensor must be one
            made = torch.Tensor._make_wrapper_subclass(
                cls,
                memory.size(),
                strides=memory.stride(),
                storage_offset=memory.storage_offset(),
                dtype=memory.dtype,
                layout=memory.layout,
                device="meta",
            )
        made.memory = memory
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DeviceTensor({self.memory!r})"

    __torch_dispatch__ = classmethod(lambda cls, func, *_: _outside(func))  # type: ignore[assignment]


def _outside(func: Any) -> Any:
    raise AssertionError(f"{func} on a tensor of the device, which is gone")


class Device(TorchDispatchMode):
    """The emulated device while it is active.

    Attributes:
        to_host, to_device: numbers of elements of every copy.
        waits: operations and synchronize calls in which the host waited.
        launches: operations launched outside graphs.
        graphs: all captured graphs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.to_host: list[int] = []
        self.to_device: list[int] = []
        self.waits: Counter[str] = Counter()
        self.launches = 0
        self.graphs: list[Graph] = []
        self.capturing: Graph | None = None
        self.names_meta = False  # what Python does not call meta is this device in C++ parts

    # Operations.

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        flat = _leaves((args, kwargs))
        given = [value for value in flat if isinstance(value, torch.Tensor)]
        there = [tensor for tensor in given if isinstance(tensor, DeviceTensor)]
        kinds = {value.type for value in flat if isinstance(value, torch.device)}
        if not there and "cuda" not in kinds:
            elsewhere = self.names_meta or any(t.device.type == "meta" for t in given)
            if "meta" not in kinds or elsewhere:
                return func(*args, **kwargs)
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE):
            with self:  # under inference mode such operations arrive whole
                found = func.decompose(*args, **kwargs)
            if found is not NotImplemented:
                return found
        if name == "_fused_sdp_choice":
            return _NO_FUSED_ATTENTION
        if name == "_to_copy":
            return self._copied(func, args, kwargs)
        if name == "copy_" and len(there) < len(given):
            return self._copied_into(*args)
        self._check(name, given, there, args)
        return self._launched(func, args, kwargs)

    def _copied(self, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        source = args[0]
        target = torch.device(kwargs.get("device") or source.device)
        target = HERE if target.type == "meta" else target
        if isinstance(source, DeviceTensor) and target.type == "cuda":
            # What torch's C++ parts took for a move is none.
            stays = "device" in kwargs and kwargs.get("dtype") in (None, source.dtype)
            return source if stays else self._launched(func, args, kwargs)
        local = {**kwargs, "device": CPU}
        local.pop("pin_memory", None)
        if isinstance(source, DeviceTensor):
            self._crosses("to the host", self.to_host, source)
            self.waits["a copy to the host"] += 1
            return func(source.memory, **local)
        self._crosses("to the device", self.to_device, source)
        found = func(source, **local)
        return DeviceTensor(found.clone() if _shares(found, source) else found)

    def _copied_into(self, target: torch.Tensor, source: torch.Tensor, *rest: Any) -> torch.Tensor:
        if isinstance(target, DeviceTensor):
            self._crosses("to the device", self.to_device, source)
            target.memory.copy_(source)
        else:
            assert isinstance(source, DeviceTensor)
            self._crosses("to the host", self.to_host, source)
            self.waits["a copy to the host"] += 1
            target.copy_(source.memory)
        return target

    def _crosses(self, way: str, copies: list[int], tensor: torch.Tensor) -> None:
        copies.append(tensor.numel())
        self.forbid(f"a copy of {tuple(tensor.shape)} {way}")

    def _check(self, name: str, given: list[Any], there: list[Any], args: Any) -> None:
        """Rejects what CUDA rejects; counts waits and implicit copies from the host."""
        masked = name in ("index", "index_put_", "index_put") and any(
            isinstance(at, torch.Tensor) and at.dtype == torch.bool for at in args[1]
        )
        if name in WAITS or masked:
            self.waits[name] += 1
            self.forbid(f"{name}, which waits for the device,")
        here = [tensor for tensor in given if not isinstance(tensor, DeviceTensor)]
        for tensor in here:
            if name in ("index", "index_put_", "index_put"):  # indices may come from the host
                self._crosses("to the device", self.to_device, tensor)
            elif tensor.dim() or not there:
                raise RuntimeError(
                    f"{name}: expected all tensors on one device, found cuda:0 and cpu"
                    f" {tuple(tensor.shape)}"
                )
            elif name == "where":  # moved there by a blocking copy; arithmetic passes it by value
                self._crosses("to the device", self.to_device, tensor)
                self.waits["a scalar of where"] += 1

    def _launched(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        local_args, local_kwargs = _mapped(_memory, (args, kwargs))
        if "device" in local_kwargs:
            local_kwargs["device"] = CPU
        found = func(*local_args, **local_kwargs)
        self.launches += 1
        if self.capturing is not None:
            self.capturing.record(func, local_args, local_kwargs, found)
        known = {id(t.memory): t for t in _leaves((args, kwargs)) if _is_there(t)}
        return _mapped(lambda value: _wrapped(value, known), found)

    def forbid(self, what: str) -> None:
        """Raises an error during capture."""
        if self.capturing is not None:
            raise RuntimeError(f"{what} is not permitted when stream is capturing")

    def synchronize(self, *_: Any) -> None:
        """Replaces ``torch.cuda.synchronize``."""
        self.waits["synchronize"] += 1
        self.forbid("synchronize")

    # Graphs.

    @contextmanager
    def capture(self, graph: Graph, pool: Any = None, **_: Any) -> Iterator[None]:
        """Replaces ``torch.cuda.graph``."""
        assert self.capturing is None, "one capture at a time"
        self.capturing, graph.pool = graph, pool
        try:
            yield
        finally:
            self.capturing = None
        self.graphs.append(graph)
        graph.spoil()  # a capture computes nothing


class _Named(TorchFunctionMode):
    """Normalises device names: ``to("cuda")`` gets an index; meta stays meta."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.to:  # torch would ask a driver for the number
            args, kwargs = _mapped(_numbered, (args, kwargs))
        if func is torch.Tensor.tolist:
            return args[0].cpu().tolist()  # which subclasses have not
        if func is torch.tensor and str(kwargs.get("device")) in ("cuda", "cuda:0"):
            return func(*args, **{**kwargs, "device": CPU}).to(HERE)  # as it does it
        before = self._device.names_meta
        self._device.names_meta = any(_is(v, "meta") for v in _leaves((args, kwargs)))
        try:
            return func(*args, **kwargs)
        finally:
            self._device.names_meta = before


def _is(value: Any, name: str) -> bool:
    return isinstance(value, str | torch.device) and str(value) == name


def _numbered(value: Any) -> Any:
    return HERE if _is(value, "cuda") else value


class Graph:
    """Replaces ``torch.cuda.CUDAGraph``.

    Attributes:
        pool: memory pool; None: a private one.
        replays: number of replays.
    """

    def __init__(self, device: Device) -> None:
        self.pool: Any = None
        self.replays = 0
        self._device = device
        self._holds = False
        self._steps: list[tuple[Any, Any, Any, list[tuple[int, torch.Tensor]]]] = []

    def record(self, func: Any, args: Any, kwargs: Any, found: Any) -> None:
        """Records an operation and its results in new memory."""
        given = [t for t in _leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        results = enumerate(_leaves(found))
        made = [
            (place, result)
            for place, result in results
            if isinstance(result, torch.Tensor) and not any(_shares(result, t) for t in given)
        ]
        # A number from the host is what it was at the time of the capture.
        writes = not isinstance(func, torch._ops.OpOverload) or func._schema.is_mutable
        if made or writes:
            self._steps.append((func, args, kwargs, made))

    def replay(self) -> None:
        """Runs the operations again; invalidates the results of other graphs of the pool."""
        self._device.forbid("a replay")
        for other in self._device.graphs:
            shared = self.pool is not None and other.pool == self.pool
            if shared and other is not self and other._holds:
                other.spoil()
        for func, args, kwargs, made in self._steps:
            results = _leaves(func(*args, **kwargs))
            for place, kept in made:
                kept.copy_(results[place])
        self.replays += 1
        self._holds = True

    def spoil(self) -> None:
        """Overwrites the results."""
        self._holds = False
        for *_, made in self._steps:
            for _, result in made:
                if result.is_floating_point():
                    result.fill_(torch.nan)
                else:
                    result.fill_(1)


def _leaves(value: Any) -> list[Any]:
    """Leaves of nested tuples, lists and dicts.

    ``torch.utils._pytree`` also knows other classes, and takes half the time of a pass here.
    """
    found: list[Any] = []
    _add_leaves(value, found)
    return found


def _add_leaves(value: Any, found: list[Any]) -> None:
    if isinstance(value, tuple | list):
        for each in value:
            _add_leaves(each, found)
    elif isinstance(value, dict):
        for each in value.values():
            _add_leaves(each, found)
    else:
        found.append(value)


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """The same nested tuples, lists and dicts with changed leaves."""
    if isinstance(value, tuple | list):
        made = [_mapped(change, each) for each in value]
        return made if type(value) is list else type(value)(made)
    if isinstance(value, dict):
        return {key: _mapped(change, each) for key, each in value.items()}
    return change(value)


def _is_there(value: Any) -> bool:
    return isinstance(value, DeviceTensor)


def _memory(value: Any) -> Any:
    return value.memory if isinstance(value, DeviceTensor) else value


def _wrapped(value: Any, known: dict[int, DeviceTensor]) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return known[id(value)] if id(value) in known else DeviceTensor(value)


def _shares(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


class _Event:
    """Replaces ``torch.cuda.Event``; the device has always finished."""

    def record(self) -> None:
        self._at = perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: _Event) -> float:
        return (end._at - self._at) * 1e3


@contextmanager
def emulated() -> Iterator[Device]:
    """Activates the device: replaces the functions of ``torch.cuda`` that the library uses."""
    device = Device()
    stream = SimpleNamespace(
        synchronize=device.synchronize, wait_stream=lambda _: None, cuda_stream=0
    )
    replaced: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda _: None,
        "device": lambda _: nullcontext(),
        "stream": lambda _: nullcontext(),
        "Stream": lambda *_: stream,
        "current_stream": lambda *_: stream,
        "synchronize": device.synchronize,
        "empty_cache": lambda: None,
        "get_device_name": lambda *_: "emulated",
        "get_device_properties": lambda *_: SimpleNamespace(
            multi_processor_count=2, name="emulated"
        ),
        "Event": lambda **_: _Event(),
        "CUDAGraph": lambda: Graph(device),
        "graph": device.capture,
        "graph_pool_handle": object,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in replaced.items():
            patch.setattr(torch.cuda, name, value)
        # What runs on this device ends with it, and captures nothing in later tests.
        patch.setattr(timed_runs, "_observers", WeakSet())
        # Modules that move get new parameters: the old ones are of another class.
        patch.setattr(torch.__future__, "_overwrite_module_params_on_conversion", True)
        with _filled_memory(), _Named(device), device:
            yield device


@contextmanager
def _filled_memory() -> Iterator[None]:
    """Fills new memory, which torch does under deterministic algorithms only."""
    was = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=only_warned)
        torch.utils.deterministic.fill_uninitialized_memory = filled
