"""Forward passes in ONNX Runtime, on a CPU, over this library's caches (``model.backend=onnx``).

Shape letters: R rows of one request, A rows whose logits are computed, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
        self._states = dict(zip(states, graph.hidden_names, strict=True))
        self._windows = tuple(dict.fromkeys(option.window for option in options.values()))
        self._spec, self._is_first, self._is_last = spec, is_first, is_last
        self._num_layers = len(options)
        self._session = _session(graph.model, graph.weights)
        self._bindings: WeakKeyDictionary[TreeCache, tuple[tuple[int, int], Any]] = (
            WeakKeyDictionary()
        )
        self._zeros = torch.zeros(1)
        self.num_passes = 0

    def run(
        self,
        rows: Sequence[Rows],
        hidden: Tensor | None,
        logits_rows: IntArray | None,
        wants_logits: bool,
    ) -> RunnerOutput:
        """Runs the rows of one or more requests; arguments as of ``ModelRunner.forward``."""
        num_rows = sum(map(len, rows))
        chosen = np.arange(num_rows) if logits_rows is None else logits_rows
        logits = torch.empty(len(chosen), self._vocab_size) if wants_logits else None
        states = {name: torch.empty(num_rows, self._hidden_size) for name in self._states}
        start = 0
        for part in rows:
            if not len(part):
                continue
            stop = start + len(part)
            mine = np.flatnonzero((chosen >= start) & (chosen < stop))
            target = None
            if logits is not None and len(mine):
                target = (
                    logits if len(mine) == len(chosen) else torch.empty(len(mine), logits.shape[1])
                )
            self._run_one(
                part,
                None if hidden is None else hidden[start:stop].contiguous(),
                chosen[mine] - start,
                target,
                {name: state[start:stop] for name, state in states.items()},
            )
            if logits is not None and target is not None and target is not logits:
                logits[torch.from_numpy(mine)] = target
            start = stop
        captured = {name: states[name] for name in self._capture}
        return RunnerOutput(hidden=states[self._output], logits=logits, captured=captured)

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
        self,
        rows: Rows,
        hidden: Tensor | None,
        logits_rows: IntArray,
        logits: Tensor | None,
        states: Mapping[HiddenName, Tensor],
    ) -> None:
        """One session call; the outputs are written to the given contiguous tensors."""
        num_rows, end = len(rows), rows.end
        keys_values, done = rows.cache.buffers(rows)
        binding = self._binding(rows.cache, keys_values)
        bind = binding.bind_input
        kept: list[Any] = []  # memory that the call reads

        def ints(name: str, values: IntArray, kind: type = np.int64) -> None:
            array: IntArray = np.ascontiguousarray(values, kind)
            kept.append(array)
            bind(name, "cpu", 0, kind, array.shape, array.ctypes.data)

        if hidden is None:
            ints("tokens", rows.tokens[None])
        else:
            shape = (1, *hidden.shape)
            bind("hidden", "cpu", 0, np.float32, shape, hidden.data_ptr())
        ints("positions", rows.positions[None])
        ints("last_slot", np.array([end - 1]), np.int32)
        ints("num_slots", np.array([end]), np.int32)
        part = RequestPart(rows)
        for window in self._windows:
            mask = part.mask(window)
            if mask is None:  # every row sees what the causal order allows
                if len(self._zeros) < num_rows * end:
                    self._zeros = torch.zeros(2 * num_rows * end)
                mask = self._zeros
            kept.append(mask)
            shape = (1, 1, num_rows, end)
            bind(mask_name(window), "cpu", 0, np.float32, shape, mask.data_ptr())
        if self._is_last:
            if logits is None:
                logits_rows, logits = _WITHOUT_LOGITS, torch.empty(1, self._vocab_size)
            ints("logits_rows", logits_rows)
            _bind_output(binding, "logits", logits)
        for name, state in states.items():
            _bind_output(binding, self._states[name], state)
        self._session.run_with_iobinding(binding)
        self.num_passes += 1
        done()

    def _binding(self, cache: TreeCache, keys_values: Tensor) -> Any:
        """The bound buffers of a request's keys and values, bound anew where they have moved."""
        place = (keys_values.data_ptr(), keys_values.shape[3])
        known = self._bindings.get(cache)
        if known is not None and known[0] == place:
            return known[1]
        binding = self._session.io_binding()
        for layer in range(self._num_layers):
            for name, tensor in (
                ("keys", keys_values[2 * layer]),
                ("values", keys_values[2 * layer + 1]),
            ):
                shape, pointer = tuple(tensor.shape), tensor.data_ptr()
                binding.bind_input(f"past_{name}_{layer}", "cpu", 0, np.float32, shape, pointer)
                binding.bind_output(f"{name}_{layer}", "cpu", 0, np.float32, shape, pointer)
        self._bindings[cache] = (place, binding)
        return binding


def _bind_output(binding: Any, name: str, tensor: Tensor) -> None:
    shape = (1, *tensor.shape)
    binding.bind_output(name, "cpu", 0, np.float32, shape, tensor.data_ptr())


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
