"""Forward passes in ONNX Runtime, on a CPU, over this library's caches (``model.backend=onnx``).

Shape letters: R rows of one request, A rows whose logits are computed, E hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any
from weakref import finalize

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from specdec.attention.kv_cache import Rows, TreeCache
from specdec.attention.kv_storage import CacheSpec
from specdec.attention.tree_attention import ScoreOptions, host_mask
from specdec.errors import UserError
from specdec.models.captured import RunnerOutput
from specdec.models.onnx_graph import build_graph, mask_name, unsupported
from specdec.types import HiddenName, IntArray

Run = Callable[[Sequence[Rows], Tensor | None, IntArray | None, bool], RunnerOutput]
"""A way to run a pass, with the arguments of ``OnnxPasses.run``."""

_PACKAGES = ("onnx", "onnxruntime")
_MEMORIES = 256  # numbers of rows whose arrays are kept
_SAMPLE = 8  # tokens of the comparison with eager passes
_WITHOUT_LOGITS: IntArray = np.zeros(1, np.int64)  # one row: graphs with none are not tested


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


class OnnxPasses:
    """Runs every pass of one slice in an ONNX Runtime session, one request after another.

    Attributes:
        num_passes: number of session calls so far.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        options: Mapping[int, ScoreOptions],
        output: HiddenName,
        capture: Sequence[HiddenName],
        spec: CacheSpec,
        first_layer: int,
        is_first: bool,
        is_last: bool,
    ) -> None:
        """Builds the graph and the session.

        Args:
            output: the slice's output, after its last layer.
            capture: further hidden states that every pass returns.
            spec: shape and type of the caches.
            model, options, first_layer, is_first, is_last: see
                ``specdec.models.onnx_graph.build_graph``.

        Raises:
            UserError: for a family or an attention that graphs do not support.
        """
        config = model.config.get_text_config()
        reason = problem(config, spec.dtype, spec.device)
        if reason:
            raise UserError(f"model.backend=onnx cannot be used: {reason}; use model.backend=eager")
        states = list(dict.fromkeys([output, *capture]))
        graph = build_graph(
            model,
            options=options,
            states=states,
            first_layer=first_layer,
            is_first=is_first,
            is_last=is_last,
        )
        self._hidden_size, self._vocab_size = config.hidden_size, config.vocab_size
        self._captured = [(name, states.index(name)) for name in capture]
        self._outputs = graph.hidden_names
        windows = dict.fromkeys(option.window for option in options.values())
        self._windows = [(mask_name(window), window) for window in windows]
        self._spec, self._is_first, self._is_last = spec, is_first, is_last
        self._session = _session(graph.model, graph.weights)
        self._bindings: dict[int, _Bound] = {}  # id of a live cache -> its binding
        # (rows, rows of logits, None for every row) -> arrays
        self._memories: dict[tuple[int, int | None], _Memory] = {}
        self._flat: dict[str, np.ndarray[Any, Any]] = {}  # name -> memory of ``_shared_array``
        self._zeros = np.zeros(1, np.float32)
        self.num_passes = 0

    def run(
        self,
        rows: Sequence[Rows],
        hidden: Tensor | None,
        logits_rows: IntArray | None,
        wants_logits: bool,
    ) -> RunnerOutput:
        """Runs the rows of one or more requests; arguments as of ``ModelRunner.forward``."""
        if len(rows) == 1:
            chosen = logits_rows if wants_logits else _WITHOUT_LOGITS
            found, states = self._run_one(rows[0], hidden, chosen)
            return self._runner_output(found if wants_logits else None, states)
        num_rows = sum(map(len, rows))
        wanted = np.arange(num_rows) if logits_rows is None else logits_rows
        logits = torch.empty(len(wanted), self._vocab_size) if wants_logits else None
        parts: list[list[Tensor]] = []
        start = 0
        for part in rows:
            stop = start + len(part)
            if stop == start:
                continue
            mine = np.flatnonzero((wanted >= start) & (wanted < stop))
            inputs = None if hidden is None else hidden[start:stop]
            own = wanted[mine] - start if wants_logits and len(mine) else _WITHOUT_LOGITS
            found, states = self._run_one(part, inputs, own)
            if logits is not None and len(mine):
                logits[torch.from_numpy(mine)] = found
            parts.append(states)
            start = stop
        return self._runner_output(logits, [torch.cat(state) for state in zip(*parts, strict=True)])

    def _runner_output(self, logits: Tensor | None, states: Sequence[Tensor]) -> RunnerOutput:
        captured = {name: states[i] for name, i in self._captured}
        return RunnerOutput(hidden=states[0], logits=logits, captured=captured)

    def compare(self, eager: Run) -> None:
        """Compares the outputs on a small tree with those of another way to run a pass.

        Raises:
            UserError: they differ by more than rounding.
        """
        places = np.arange(_SAMPLE)
        hidden = None
        if not self._is_first:
            generator = torch.Generator().manual_seed(0)
            hidden = torch.randn(_SAMPLE, self._hidden_size, generator=generator)
        outputs = []
        for run in (self.run, eager):
            cache = TreeCache(spec=self._spec, capacity=_SAMPLE)
            half = _SAMPLE // 2
            parents = np.maximum(-1, places[:half] - 2)  # two roots, and a chain below each
            for rows, part in (
                (cache.rows(prefix_tokens=places[:half]), slice(0, half)),
                (
                    cache.rows(
                        node_ids=places[:half],
                        node_tokens=places[half:],
                        parent_ids=parents,
                        node_positions=half + places[:half] // 2,
                    ),
                    slice(half, None),
                ),
            ):
                inputs = None if hidden is None else hidden[part]
                output = run([rows], inputs, None, self._is_last)
                outputs.append(output.hidden if output.logits is None else output.logits)
        found, expected = torch.cat(outputs[:2]), torch.cat(outputs[2:])
        error = (found - expected).abs().max().item()
        bound = torch.finfo(torch.float32).eps ** 0.5 * expected.abs().max().item()
        if not error <= bound:
            raise UserError(
                f"model.backend=onnx cannot run this model: its outputs differ by {error:.2g} from"
                " those of model.backend=eager; use that"
            )

    def _run_one(
        self, rows: Rows, hidden: Tensor | None, logits_rows: IntArray | None
    ) -> tuple[Tensor, list[Tensor]]:
        """One session call.

        Args:
            rows: of one request, at least one.
            hidden: [R, E], input of every slice but the first.
            logits_rows: int64[A], A >= 1; None: every row.

        Returns:
            The logits [A, V], without entries where the slice is not the last; the states [R, E].
        """
        num_rows, end = len(rows), rows.end
        keys_values, done = rows.cache.buffers(rows)
        bound = self._bound(rows.cache, keys_values)
        memory = self._memory(num_rows, None if logits_rows is None else len(logits_rows))
        if bound.memory is not memory:
            memory.bind(bound.binding)
            bound.memory = memory
        into = memory.inputs
        if hidden is None:
            into["tokens"][0] = rows.tokens
        else:
            into["hidden"][0] = hidden.numpy()
        into["positions"][0] = rows.positions
        if self._is_last and logits_rows is not None:
            into["logits_rows"][:] = logits_rows
        bound.last_slot[0], bound.num_slots[0] = end - 1, end
        for name, window in self._windows:
            mask = host_mask(rows, window)
            # Without a mask every row sees what the causal order allows.
            dense = self._no_mask(num_rows * end) if mask is None else mask
            # Without a copy; the binding keeps the array.
            bound.binding.bind_cpu_input(name, dense.reshape(1, 1, num_rows, end))
        self._session.run_with_iobinding(bound.binding)
        self.num_passes += 1
        done()
        found = [torch.from_numpy(array[0].copy()) for array in memory.outputs.values()]
        logits = found.pop() if self._is_last else torch.empty(0)
        return logits, found

    def _no_mask(self, size: int) -> np.ndarray[Any, Any]:
        if len(self._zeros) < size:
            self._zeros = np.zeros(2 * size, np.float32)
        return self._zeros[:size]

    def _memory(self, num_rows: int, num_logits: int | None) -> _Memory:
        """Memory for the inputs and outputs of passes of R rows and A logits rows (None: all).

        To bind existing values and copy the results costs less than to make new values, up to
        about 8 rows of a vocabulary of 4096 tokens (5 to 7 us against a copy of 0.7 us per row);
        32 rows cost some 20 us more, of a pass of about 6 ms.
        """
        known = self._memories.get((num_rows, num_logits))
        if known is not None:
            return known
        rows = (1, num_rows)
        inputs: dict[str, np.ndarray[Any, Any]] = {"positions": np.empty(rows, np.int64)}
        if self._is_first:
            inputs["tokens"] = np.empty(rows, np.int64)
        else:
            inputs["hidden"] = self._shared_array("hidden", (*rows, self._hidden_size))
        shapes = dict.fromkeys(self._outputs, (*rows, self._hidden_size))
        if self._is_last:
            inputs["logits_rows"] = chosen = np.arange(num_rows if num_logits is None else num_logits)
            shapes["logits"] = (1, len(chosen), self._vocab_size)
        outputs = {name: self._shared_array(name, shape) for name, shape in shapes.items()}
        if len(self._memories) >= _MEMORIES:  # prompts have many lengths
            self._memories.clear()
        memory = _Memory(inputs, outputs)
        self._memories[num_rows, num_logits] = memory
        return memory

    def _shared_array(self, name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        """An array in the memory that all arrays of this name share."""
        flat, size = self._flat.get(name), math.prod(shape)
        if flat is None or len(flat) < size:
            flat = self._flat[name] = np.empty(2 * size, np.float32)
            self._memories.clear()
        return flat[:size].reshape(shape)

    def _bound(self, cache: TreeCache, keys_values: Tensor) -> _Bound:
        """The binding of a request, with its keys and values; a new one where they have moved."""
        known = self._bindings.get(id(cache))
        if known is not None and known.keys_values is keys_values:
            return known
        if known is None:
            # Cheaper for every pass than a weak mapping, which makes a reference per look-up.
            finalize(cache, self._bindings.pop, id(cache), None).atexit = False
        binding = self._session.io_binding()
        for i, tensor in enumerate(keys_values.numpy()):
            name, value = f"{('keys', 'values')[i % 2]}_{i // 2}", _value(tensor)
            binding.bind_ortvalue_input(f"past_{name}", value)
            binding.bind_ortvalue_output(name, value)
        bound = _Bound(keys_values=keys_values, binding=binding)
        binding.bind_cpu_input("last_slot", bound.last_slot)
        binding.bind_cpu_input("num_slots", bound.num_slots)
        self._bindings[id(cache)] = bound
        return bound


class _Memory:
    """Arrays of a session's inputs and outputs for one number of rows, and how to bind them.

    Attributes:
        inputs, outputs: name -> array; written before, and copied after every pass.
    """

    def __init__(
        self, inputs: dict[str, np.ndarray[Any, Any]], outputs: dict[str, np.ndarray[Any, Any]]
    ) -> None:
        self.inputs, self.outputs = inputs, outputs
        self._inputs = [(name, _value(array)) for name, array in inputs.items()]
        self._outputs = [(name, _value(array)) for name, array in outputs.items()]

    def bind(self, binding: Any) -> None:
        """Makes a binding read and write the arrays."""
        for name, value in self._inputs:
            binding.bind_ortvalue_input(name, value)
        for name, value in self._outputs:
            binding.bind_ortvalue_output(name, value)


@dataclass(slots=True, kw_only=True)
class _Bound:
    """A binding with a request's keys and values.

    Attributes:
        keys_values: the tensor that is bound.
        binding: of the session's inputs and outputs.
        memory: the other inputs and outputs that are bound; None before the first pass.
        last_slot, num_slots: int32[1], bound inputs that every pass sets.
    """

    keys_values: Tensor
    binding: Any
    memory: _Memory | None = None
    last_slot: np.ndarray[Any, Any] = field(default_factory=lambda: np.zeros(1, np.int32))
    num_slots: np.ndarray[Any, Any] = field(default_factory=lambda: np.zeros(1, np.int32))


def _value(array: np.ndarray[Any, Any]) -> Any:
    """The array as a value of ONNX Runtime, over the same memory."""
    import onnxruntime

    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


def _session(model: bytes, weights: Mapping[str, np.ndarray[Any, Any]]) -> Any:
    """A session with as many threads as torch uses now."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    # Waiting threads would take a core from the other processes and threads of a run.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    values = [onnxruntime.OrtValue.ortvalue_from_numpy(array) for array in weights.values()]
    options.add_external_initializers(list(weights), values)
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
