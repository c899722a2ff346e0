"""Forward passes in ONNX Runtime, on a CPU, over this library's caches (``model.backend=onnx``).

Shape letters: R rows of one request, A rows whose logits are computed, E hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from specdec.attention.kv_cache import Rows, TreeCache
from specdec.attention.kv_storage import CacheSpec
from specdec.attention.tree_attention import RequestPart, ScoreOptions
from specdec.errors import UserError
from specdec.models.captured import RunnerOutput
from specdec.models.onnx_graph import build_graph, mask_name, unsupported
from specdec.types import HiddenName, IntArray

Run = Callable[[Sequence[Rows], Tensor | None, IntArray | None, bool], RunnerOutput]
"""A way to run a pass, with the arguments of ``OnnxPasses.run``."""

_PACKAGES = ("onnx", "onnxruntime")
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
        self._output, self._capture = output, tuple(capture)
        self._states, self._outputs = states, graph.hidden_names
        self._windows = tuple(dict.fromkeys(option.window for option in options.values()))
        self._spec, self._is_first, self._is_last = spec, is_first, is_last
        self._session = _session(graph.model, graph.weights)
        self._bindings: WeakKeyDictionary[TreeCache, _Bound] = WeakKeyDictionary()
        self._memories: dict[tuple[str, tuple[int, ...]], _Memory] = {}
        self._flat: dict[str, np.ndarray[Any, Any]] = {}  # name of an output -> its memory
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
        named = dict(zip(self._states, states, strict=True))
        captured = {name: named[name] for name in self._capture}
        return RunnerOutput(hidden=named[self._output], logits=logits, captured=captured)

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
        bind = bound.binding.bind_cpu_input  # without a copy; the binding keeps the array
        if hidden is None:
            bind("tokens", np.ascontiguousarray(rows.tokens)[None])
        else:
            bind("hidden", hidden.contiguous().numpy()[None])
        bind("positions", np.ascontiguousarray(rows.positions)[None])
        bound.last_slot[0], bound.num_slots[0] = end - 1, end
        part = RequestPart(rows)
        for window in self._windows:
            mask = part.mask(window)
            # Without a mask every row sees what the causal order allows.
            dense = self._no_mask(num_rows * end) if mask is None else mask.numpy()
            bind(mask_name(window), dense.reshape(1, 1, num_rows, end))
        outputs = [self._memory(name, (1, num_rows, self._hidden_size)) for name in self._outputs]
        if self._is_last:
            chosen = np.arange(num_rows) if logits_rows is None else logits_rows
            bind("logits_rows", np.ascontiguousarray(chosen))
            outputs.append(self._memory("logits", (1, len(chosen), self._vocab_size)))
        for output in outputs:
            bound.binding.bind_ortvalue_output(output.name, output.value)
        self._session.run_with_iobinding(bound.binding)
        self.num_passes += 1
        done()
        found = [torch.from_numpy(output.array[0].copy()) for output in outputs]
        logits = found.pop() if self._is_last else torch.empty(0)
        return logits, found

    def _no_mask(self, size: int) -> np.ndarray[Any, Any]:
        if len(self._zeros) < size:
            self._zeros = np.zeros(2 * size, np.float32)
        return self._zeros[:size]

    def _memory(self, name: str, shape: tuple[int, ...]) -> _Memory:
        """Memory of an output, which later passes of the same shape write to again.

        To bind an existing value and copy the results costs less than to make a new value, up to
        about 8 rows of a vocabulary of 4096 tokens (5 to 7 us against a copy of 0.7 us per row);
        32 rows cost some 20 us more, of a pass of about 6 ms.
        """
        memory = self._memories.get((name, shape))
        if memory is None:
            flat = self._flat.get(name)
            size = math.prod(shape)
            if flat is None or len(flat) < size:
                flat = self._flat[name] = np.empty(2 * size, np.float32)
                self._memories = {k: m for k, m in self._memories.items() if k[0] != name}
            array = flat[:size].reshape(shape)
            memory = _Memory(name=name, array=array, value=_value(array))
            self._memories[name, shape] = memory
        return memory

    def _bound(self, cache: TreeCache, keys_values: Tensor) -> _Bound:
        """The binding of a request, with its keys and values; a new one where they have moved."""
        place = (keys_values.data_ptr(), keys_values.shape[3])
        known = self._bindings.get(cache)
        if known is not None and known.place == place:
            return known
        binding = self._session.io_binding()
        for i, tensor in enumerate(keys_values.numpy()):
            name, value = f"{('keys', 'values')[i % 2]}_{i // 2}", _value(tensor)
            binding.bind_ortvalue_input(f"past_{name}", value)
            binding.bind_ortvalue_output(name, value)
        bound = _Bound(place=place, binding=binding)
        binding.bind_cpu_input("last_slot", bound.last_slot)
        binding.bind_cpu_input("num_slots", bound.num_slots)
        self._bindings[cache] = bound
        return bound


@dataclass(frozen=True, slots=True, kw_only=True)
class _Memory:
    """Memory of one output of a session: an array, and the same as a value of ONNX Runtime."""

    name: str
    array: np.ndarray[Any, Any]
    value: Any


@dataclass(slots=True, kw_only=True)
class _Bound:
    """A binding with a request's keys and values.

    Attributes:
        place: address and capacity of the keys and values.
        binding: of the session's inputs and outputs.
        last_slot, num_slots: int32[1], bound inputs that every pass sets.
    """

    place: tuple[int, int]
    binding: Any
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
