"""Sessions of ONNX Runtime over this library's caches: bound memory, masks and calls.

Shape letters: R rows of one request, n slots in use after the pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, TypeAlias
from weakref import finalize

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from specdec.attention.kv_cache import Rows, TreeCache
from specdec.attention.tree_attention import host_mask
from specdec.errors import UserError
from specdec.models.onnx_graph import Graph, mask_name, unsupported

Array: TypeAlias = np.ndarray[Any, Any]
"""An input or output of a session."""

Key: TypeAlias = tuple[int | None, ...]
"""Sizes of a pass, which determine the shapes of all inputs and outputs but the mask."""

_PACKAGES = ("onnx", "onnxruntime")
_MEMORIES = 256  # sizes of passes whose arrays are kept


def problem(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why ``model.backend=onnx`` cannot run models with this configuration; None if it can."""
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} cannot be imported: pip install {' '.join(missing)}"
    if device.type != "cpu":
        return f"it runs on a CPU only, and the models are on {device}"
    if dtype != torch.float32:
        return f"it computes in float32 only, not in {str(dtype).removeprefix('torch.')}"
    return unsupported(config)


def refuse_wrong(found: Iterable[Tensor], expected: Iterable[Tensor], what: str) -> None:
    """Compares the results of passes in ONNX Runtime with those of eager ones.

    Args:
        found, expected: tensors of equal shapes, the results of both.
        what: ran the passes, for the message.

    Raises:
        UserError: they differ by more than rounding.
    """
    both = [torch.cat([part.flatten() for part in parts]) for parts in (found, expected)]
    error = (both[0] - both[1]).abs().max().item()
    bound = torch.finfo(torch.float32).eps ** 0.5 * both[1].abs().max().item()
    if not error <= bound:
        raise UserError(
            f"model.backend=onnx cannot run this {what}: its outputs differ by {error:.2g} from"
            " those of model.backend=eager; use that"
        )


class CacheSession:
    """A session whose graph appends the rows of one request to the request's own cache."""

    def __init__(self, graph: Graph, windows: Iterable[int | None]) -> None:
        """Makes the session, with as many threads as torch uses now.

        Args:
            graph: see ``onnx_graph``.
            windows: of its layers' attention; None: no sliding window.
        """
        self._session = new_session(graph)
        self._windows = [(mask_name(window), window) for window in dict.fromkeys(windows)]
        self._last_slot, self._num_slots = np.zeros(1, np.int32), np.zeros(1, np.int32)
        slots = {"last_slot": self._last_slot, "num_slots": self._num_slots}
        self._bindings = Bindings(self._session, slots)
        self._memories: dict[Key, Memory] = {}
        self._flat: dict[str, Array] = {}  # name -> memory of ``shared_array``
        self._zeros = np.zeros(1, np.float32)

    def memory(self, key: Key) -> Memory | None:
        """The arrays of passes of these sizes; None if they must be made by ``new_memory``."""
        return self._memories.get(key)

    def new_memory(
        self, key: Key, inputs: dict[str, Array], outputs: Mapping[str, tuple[int, ...]]
    ) -> Memory:
        """Makes arrays for passes of these sizes.

        To bind existing values and copy the results costs less than to make new values, up to
        about 8 rows of a vocabulary of 4096 tokens (5 to 7 us against a copy of 0.7 us per row);
        32 rows cost some 20 us more, of a pass of about 6 ms.

        Args:
            key: the sizes.
            inputs: name -> array, which is written before every pass.
            outputs: name -> shape.
        """
        arrays = {name: self.shared_array(name, shape) for name, shape in outputs.items()}
        if len(self._memories) >= _MEMORIES:  # prompts have many lengths
            self._memories.clear()
        memory = self._memories[key] = Memory(inputs, arrays)
        return memory

    def shared_array(self, name: str, shape: tuple[int, ...]) -> Array:
        """A float32 array in the memory that all arrays of this name share."""
        flat, size = self._flat.get(name), math.prod(shape)
        if flat is None or len(flat) < size:
            flat = self._flat[name] = np.empty(2 * size, np.float32)
            self._memories.clear()
        return flat[:size].reshape(shape)

    def run(self, rows: Rows, memory: Memory) -> None:
        """Runs one pass over at least one row, from and to the arrays of ``memory``."""
        num_rows, end = len(rows), rows.end
        keys_values, done = rows.cache.buffers(rows)
        binding = self._bindings.of(rows.cache, keys_values, memory)
        memory.inputs["positions"][0] = rows.positions
        self._last_slot[0], self._num_slots[0] = end - 1, end
        for name, window in self._windows:
            mask = host_mask(rows, window)
            # Without a mask every row sees what the causal order allows.
            dense = self._no_mask(num_rows * end) if mask is None else mask
            # Without a copy; the binding keeps the array.
            binding.bind_cpu_input(name, dense.reshape(1, 1, num_rows, end))
        self._session.run_with_iobinding(binding)
        done()

    def _no_mask(self, size: int) -> Array:
        if len(self._zeros) < size:
            self._zeros = np.zeros(2 * size, np.float32)
        return self._zeros[:size]


class Bindings:
    """Bindings of a session's inputs and outputs, one per live cache."""

    def __init__(self, session: Any, inputs: Mapping[str, Array]) -> None:
        """Starts without any.

        Args:
            session: whose inputs ``past_keys_0`` and so on are caches, as are its outputs.
            inputs: name -> array that all bindings read.
        """
        self._session = session
        self._inputs = [(name, _value(array)) for name, array in inputs.items()]
        self._bound: dict[int, _Bound] = {}  # id of a live cache -> its binding

    def of(self, cache: TreeCache, keys_values: Tensor, memory: Memory) -> Any:
        """The binding of a request, from and to its keys and values and the arrays of ``memory``.

        Args:
            cache: of the request.
            keys_values: as of ``TreeCache.buffers``.
            memory: every other input and output.
        """
        bound = self._bound.get(id(cache))
        if bound is None:
            # Cheaper for every pass than a weak mapping, which makes a reference per look-up.
            finalize(cache, self._bound.pop, id(cache), None).atexit = False
        if bound is None or bound.keys_values is not keys_values:  # new, or moved
            bound = self._bound[id(cache)] = self._new(keys_values)
        if bound.memory is not memory:
            memory.bind(bound.binding)
            bound.memory = memory
        return bound.binding

    def _new(self, keys_values: Tensor) -> _Bound:
        binding = self._session.io_binding()
        for name, value in self._inputs:
            binding.bind_ortvalue_input(name, value)
        for i, tensor in enumerate(keys_values.numpy()):
            name, value = f"{('keys', 'values')[i % 2]}_{i // 2}", _value(tensor)
            binding.bind_ortvalue_input(f"past_{name}", value)
            binding.bind_ortvalue_output(name, value)
        return _Bound(keys_values=keys_values, binding=binding)


class Memory:
    """Arrays of a session's inputs and outputs for passes of some sizes, and how to bind them.

    Attributes:
        inputs, outputs: name -> array; written before, and read after every pass.
    """

    def __init__(self, inputs: dict[str, Array], outputs: dict[str, Array]) -> None:
        self.inputs, self.outputs = inputs, outputs
        self._inputs = [(name, _value(array)) for name, array in inputs.items()]
        self._outputs = [(name, _value(array)) for name, array in outputs.items()]

    def bind(self, binding: Any) -> None:
        """Makes a binding read and write the arrays."""
        for name, value in self._inputs:
            binding.bind_ortvalue_input(name, value)
        for name, value in self._outputs:
            binding.bind_ortvalue_output(name, value)

    def results(self) -> list[Tensor]:
        """Copies of the outputs, without their first dimension, which is 1."""
        return [torch.from_numpy(array[0].copy()) for array in self.outputs.values()]


@dataclass(slots=True, kw_only=True)
class _Bound:
    """A binding with a request's keys and values.

    Attributes:
        keys_values: the tensor that is bound.
        binding: of the session's inputs and outputs.
        memory: the other inputs and outputs that are bound; None before the first pass.
    """

    keys_values: Tensor
    binding: Any
    memory: Memory | None = None


def _value(array: Array) -> Any:
    """The array as a value of ONNX Runtime, over the same memory."""
    import onnxruntime

    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


def new_session(graph: Graph) -> Any:
    """A session on the CPU, with as many threads as torch uses now."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    # Waiting threads would take a core from the other processes and threads of a run.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    values = [onnxruntime.OrtValue.ortvalue_from_numpy(array) for array in graph.weights.values()]
    options.add_external_initializers(list(graph.weights), values)
    return onnxruntime.InferenceSession(graph.model, options, providers=["CPUExecutionProvider"])
