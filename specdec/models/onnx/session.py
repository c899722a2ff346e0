"""Sessions of ONNX Runtime over this library's caches: bound memory, masks and calls.

Shape letters: R rows of one request, n slots in use after the pass.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import finalize

import numpy as np
import torch
from torch import Tensor

from specdec.attention.tree_attention import Rows, TreeCache, host_mask
from specdec.models.onnx.graph import Graph, mask_name

Array: TypeAlias = np.ndarray[Any, Any]

Key: TypeAlias = tuple[int | None, ...]
"""Sizes of a pass, which determine the shapes of all inputs and outputs except the mask."""

_MEMORIES = 256  # number of pass sizes whose arrays are cached


class Memory:
    """Input and output arrays (by name) of passes of one size, which are bound to the session."""

    def __init__(self, inputs: dict[str, Array], outputs: dict[str, Array]) -> None:
        self.inputs, self.outputs = inputs, outputs
        self._inputs = [(name, _value(array)) for name, array in inputs.items()]
        self._outputs = [(name, _value(array)) for name, array in outputs.items()]

    def bind(self, binding: Any) -> None:
        for name, value in self._inputs:
            binding.bind_ortvalue_input(name, value)
        for name, value in self._outputs:
            binding.bind_ortvalue_output(name, value)

    def results(self) -> list[Tensor]:
        return [torch.from_numpy(array[0].copy()) for array in self.outputs.values()]


@dataclass(slots=True)
class _Bound:
    keys_values: Tensor
    binding: Any
    memory: Memory | None = None


class CacheSession:
    def __init__(self, graph: Graph, windows: Iterable[int | None]) -> None:
        """Creates the session for layers with these sliding ``windows`` (None: full attention)."""
        self._session = new_session(graph)
        self._windows = [(mask_name(window), window) for window in dict.fromkeys(windows)]
        self._last_slot, self._num_slots = np.zeros(1, np.int32), np.zeros(1, np.int32)
        self._bound: dict[int, _Bound] = {}  # id of a live cache -> its binding
        self._memories: dict[Key, Memory] = {}
        self._flat: dict[str, Array] = {}  # name -> memory of ``shared_array``
        self._zeros = np.zeros(1, np.float32)

    def memory(
        self, key: Key, make: Callable[[], tuple[dict[str, Array], Mapping[str, tuple[int, ...]]]]
    ) -> Memory:
        """Returns the arrays of passes of this size; ``make`` creates inputs and output shapes. For
        few rows, binding existing values and copying the results costs less than making new values.
        """
        memory = self._memories.get(key)
        if memory is None:
            inputs, outputs = make()
            arrays = {name: self.shared_array(name, shape) for name, shape in outputs.items()}
            if len(self._memories) >= _MEMORIES:  # prompts have many lengths
                self._memories.clear()
            memory = self._memories[key] = Memory(inputs, arrays)
        return memory

    def shared_array(self, name: str, shape: tuple[int, ...]) -> Array:
        flat, size = self._flat.get(name), math.prod(shape)
        if flat is None or len(flat) < size:
            flat = self._flat[name] = np.empty(2 * size, np.float32)
            self._memories.clear()
        return flat[:size].reshape(shape)

    def run(self, rows: Rows, memory: Memory) -> None:
        num_rows, end = len(rows), rows.end
        keys_values, done = rows.cache.buffers(rows)
        binding = self._binding(rows.cache, keys_values, memory)
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

    def _binding(self, cache: TreeCache, keys_values: Tensor, memory: Memory) -> Any:
        bound = self._bound.get(id(cache))
        if bound is None:
            # A finalizer is cheaper than a weak mapping, which makes a reference per look-up.
            finalize(cache, self._bound.pop, id(cache), None).atexit = False
        if bound is None or bound.keys_values is not keys_values:  # new, or moved
            binding = self._session.io_binding()
            binding.bind_ortvalue_input("last_slot", _value(self._last_slot))
            binding.bind_ortvalue_input("num_slots", _value(self._num_slots))
            for i, tensor in enumerate(keys_values.numpy()):
                name, value = f"{('keys', 'values')[i % 2]}_{i // 2}", _value(tensor)
                binding.bind_ortvalue_input(f"past_{name}", value)
                binding.bind_ortvalue_output(name, value)
            bound = self._bound[id(cache)] = _Bound(keys_values, binding)
        if bound.memory is not memory:
            memory.bind(bound.binding)
            bound.memory = memory
        return bound.binding


def _value(array: Array) -> Any:
    import onnxruntime

    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


def new_session(graph: Graph) -> Any:
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
