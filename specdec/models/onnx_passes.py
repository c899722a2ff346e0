"""Forward passes of models in ONNX Runtime, on a CPU (``model.backend=onnx``).

Shape letters: R rows of one request, A rows whose logits are computed, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.attention.kv_cache import Rows, TreeCache
from specdec.attention.kv_storage import CacheSpec
from specdec.attention.tree_attention import ScoreOptions
from specdec.errors import UserError
from specdec.models.captured import RunnerOutput
from specdec.models.onnx_graph import build_graph
from specdec.models.onnx_session import Array, CacheSession, Memory, problem, refuse_wrong
from specdec.types import HiddenName, IntArray

Run = Callable[[Sequence[Rows], Tensor | None, IntArray | None, bool], RunnerOutput]
"""A way to run a pass, with the arguments of ``OnnxPasses.run``."""

_SAMPLE = 8  # tokens of the comparison with eager passes
_WITHOUT_LOGITS: IntArray = np.zeros(1, np.int64)  # one row: graphs with none are not tested


class OnnxPasses:
    """Runs every pass of one slice in an ONNX Runtime session, one request after another."""

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
        self._spec, self._is_first, self._is_last = spec, is_first, is_last
        self._session = CacheSession(graph, {option.window for option in options.values()})

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
        refuse_wrong(outputs[:2], outputs[2:], "model")

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
        found = self._pass(rows, hidden, logits_rows).results()
        logits = found.pop() if self._is_last else torch.empty(0)
        return logits, found

    def _pass(self, rows: Rows, hidden: Tensor | None, logits_rows: IntArray | None) -> Memory:
        """One session call, arguments as of ``_run_one``; returns the memory of its results."""
        num_logits = None if logits_rows is None else len(logits_rows)
        memory = self._session.memory((len(rows), num_logits))
        if memory is None:
            memory = self._new_memory(len(rows), num_logits)
        into = memory.inputs
        if hidden is None:
            into["tokens"][0] = rows.tokens
        else:
            into["hidden"][0] = hidden.numpy()
        if self._is_last and logits_rows is not None:
            into["logits_rows"][:] = logits_rows
        self._session.run(rows, memory)
        return memory

    def _new_memory(self, num_rows: int, num_logits: int | None) -> Memory:
        """Memory for the inputs and outputs of passes of R rows and A logits rows (None: all)."""
        rows = (1, num_rows)
        inputs: dict[str, Array] = {"positions": np.empty(rows, np.int64)}
        if self._is_first:
            inputs["tokens"] = np.empty(rows, np.int64)
        else:
            inputs["hidden"] = self._session.shared_array("hidden", (*rows, self._hidden_size))
        shapes = dict.fromkeys(self._outputs, (*rows, self._hidden_size))
        if self._is_last:
            chosen = np.arange(num_rows if num_logits is None else num_logits)
            inputs["logits_rows"] = chosen
            shapes["logits"] = (1, len(chosen), self._vocab_size)
        return self._session.new_memory((num_rows, num_logits), inputs, shapes)
