"""Sessions of ONNX Runtime that read and extend this library's key/value caches in place.

Shape letters: R rows of one request, n slots in use after the pass.
"""

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias
from weakref import finalize

import numpy as np
import torch
from torch import Tensor

from specdec.attention.tree_attention import Rows, TreeCache, host_mask
from specdec.models.onnx.graph import Graph, mask_name

Array: TypeAlias = np.ndarray[Any, Any]


class CacheSession:
    def __init__(self, graph: Graph, windows: Iterable[int | None]) -> None:
        """Creates a session; ``windows``: the layers' sliding windows in tokens (None: full)."""
        self._session = new_session(graph)
        self._windows = [(mask_name(window), window) for window in dict.fromkeys(windows)]
        # id of a live cache -> its memory, and the binding that has it
        self._bound: dict[int, tuple[Tensor, Any]] = {}

    def run(
        self, rows: Rows, inputs: Mapping[str, Array], outputs: Mapping[str, tuple[int, ...]]
    ) -> list[Tensor]:
        """Runs a pass over one request's rows; adds positions, masks and the cache to ``inputs``.

        ``outputs`` maps names of outputs to shapes [1, ..]; returns each as float32[..], in order.
        """
        shape = (len(rows), rows.end)
        keys_values, done = rows.cache.buffers(rows)
        binding = self._binding(rows.cache, keys_values)
        given = {
            **inputs,
            "positions": rows.positions[None],
            "last_slot": np.array([rows.end - 1], np.int32),
            "num_slots": np.array([rows.end], np.int32),
        }
        for name, window in self._windows:
            mask = host_mask(rows, window)
            # Without a mask every row sees what the causal order allows.
            dense = np.zeros(shape, np.float32) if mask is None else mask
            given[name] = dense[None, None]
        for name, array in given.items():  # without copies; the binding keeps the arrays
            binding.bind_cpu_input(name, np.ascontiguousarray(array))
        found = {name: torch.empty(shape) for name, shape in outputs.items()}
        for name, tensor in found.items():
            binding.bind_output(name, "cpu", 0, np.float32, tensor.shape, tensor.data_ptr())
        self._session.run_with_iobinding(binding)
        done()
        return [tensor[0] for tensor in found.values()]

    def _binding(self, cache: TreeCache, keys_values: Tensor) -> Any:
        known = self._bound.get(id(cache))
        if known is None:
            finalize(cache, self._bound.pop, id(cache), None).atexit = False
        if known is None or known[0] is not keys_values:  # new, or moved
            binding = self._session.io_binding()
            for i, tensor in enumerate(keys_values.numpy()):
                name = f"{('keys', 'values')[i % 2]}_{i // 2}"
                value = _value(tensor)
                binding.bind_ortvalue_input(f"past_{name}", value)
                binding.bind_ortvalue_output(name, value)
            known = self._bound[id(cache)] = (keys_values, binding)
        return known[1]


def _value(array: Array) -> Any:
    import onnxruntime

    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


def new_session(graph: Graph) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    # Threads wait actively from one operator to the next only: longer, they would take a core from
    # the other processes and threads of a run (experiments/log/2026-12-01-short-spins.md).
    options.add_session_config_entry("session.intra_op.spin_duration_us", "20")
    options.log_severity_level = 3
    values = [_value(array) for array in graph.weights.values()]
    options.add_external_initializers(list(graph.weights), values)
    return onnxruntime.InferenceSession(graph.model, options, providers=["CPUExecutionProvider"])
