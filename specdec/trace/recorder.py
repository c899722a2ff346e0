"""Records the trees and submissions of each step of a traced run.

Recording is done by an executor that wraps the run's own: ``submit`` records the batch, ``collect``
the trees at the end of the step, ``commit`` the commits. Without a trace, no executor is wrapped.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from specdec.clocks import Clock, ClockReport, Span, Timeline
from specdec.clocks.timeline import MAX_SPANS
from specdec.types import NO_NODE, Batch, Commit, Output

if TYPE_CHECKING:
    from specdec.interfaces import Executor
    from specdec.state import RequestState

MAX_STEPS = 4000
"""Maximum number of recorded steps; beyond it the run continues and the trace is truncated."""

_DIGITS = 6  # decimals of log probabilities and seconds


@dataclass(slots=True)
class _OpenRequest:
    """An open request and its record.

    Attributes:
        request: its state.
        record: its entry in ``trees.json``.
        last_id: newest recorded node.
        submitted: node ids submitted in the current step.
    """

    request: RequestState
    record: dict[str, Any]
    last_id: int = NO_NODE
    submitted: list[int] = field(default_factory=list)


class TreeRecorder:
    """Records the growth of the trees.

    Attributes:
        requests: per request, in order of admission: ``id``, ``prefix_len`` (tokens before the
            first root) and ``steps``. A step has ``step``, ``time_s`` (at its end), ``nodes``
            (added in the step: id, parent id, token, position, log probability, origin),
            ``submitted`` (ids), ``answers`` ([id, token] pairs) and ``commit`` (None, or ``kind``,
            ``retired`` ids, ``next_token``, ``root`` id). A commit keeps the new root and its
            descendants.
        fed: step -> its submission: ``requests``, ``depths`` (minimum and maximum below the
            root), ``nodes``, ``prefill`` (number of prompt tokens).
        truncated: whether steps were omitted.
    """

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.fed: dict[int, dict[str, Any]] = {}
        self.truncated = False
        self._open_requests: dict[int, _OpenRequest] = {}
        self._num_steps = 0

    def clear(self) -> None:
        """Discards the record; requests that are open are not recorded any further."""
        self.requests.clear()
        self.fed.clear()
        self._open_requests.clear()
        self.truncated, self._num_steps = False, 0

    def open(self, request: RequestState) -> None:
        """Starts to record a request."""
        steps: list[dict[str, Any]] = []
        record = {"id": request.id, "prefix_len": request.prefix_len, "steps": steps}
        self.requests.append(record)
        self._open_requests[request.id] = _OpenRequest(request, record)

    def submit(self, step: int, batch: Batch) -> None:
        """Records the batch of a step."""
        if not batch.num_tokens:
            return
        depths = [int(d) for rows in batch.trees for d in (rows.depths.min(), rows.depths.max())]
        self.fed[step] = {
            "requests": sorted(
                {rows.request for rows in batch.trees} | {c.request for c in batch.prefills}
            ),
            "depths": [min(depths), max(depths)] if depths else None,
            "nodes": batch.num_nodes,
            "prefill": batch.num_tokens - batch.num_nodes,
        }
        for rows in batch.trees:
            if rows.request in self._open_requests:
                self._open_requests[rows.request].submitted = rows.node_ids.tolist()

    def collect(self, step: int, time_s: float, output: Output) -> None:
        """Records the trees at the end of a step, before its commits."""
        self._num_steps += 1
        if self._num_steps > MAX_STEPS:
            self.truncated = True
            return
        answers: dict[int, list[list[int]]] = {}
        for part in output.answers:
            pairs = zip(part.node_ids.tolist(), part.tokens.tolist(), strict=True)
            answers.setdefault(part.request, []).extend(map(list, pairs))
        for request_id, entry in self._open_requests.items():
            nodes = _new_nodes(entry)
            answered = answers.get(request_id, [])
            if not (nodes or entry.submitted or answered):
                continue
            entry.record["steps"].append(
                {
                    "step": step,
                    "time_s": round(time_s, _DIGITS),
                    "nodes": nodes,
                    "submitted": entry.submitted,
                    "answers": answered,
                    "commit": None,
                }
            )
            entry.submitted = []

    def commit(self, step: int, commits: Sequence[Commit]) -> None:
        """Records the commits of a step."""
        for commit in commits:
            entry = self._open_requests.get(commit.request)
            steps = entry.record["steps"] if entry is not None else ()
            if steps and steps[-1]["step"] == step:
                steps[-1]["commit"] = {
                    "kind": commit.kind.value,
                    "retired": commit.retired_ids.tolist(),
                    "next_token": int(commit.next_token),
                    "root": int(commit.root_id),
                }

    def close(self, request_id: int) -> None:
        """Stops recording a request."""
        self._open_requests.pop(request_id, None)


def _new_nodes(entry: _OpenRequest) -> list[list[Any]]:
    """Nodes added since the last call; ids are ascending, so they are the last ones."""
    tree = entry.request.tree
    first = int(tree.ids.searchsorted(entry.last_id, side="right"))
    entry.last_id = int(tree.ids[-1])
    nodes = []
    for slot in range(first, len(tree)):
        parent = int(tree.parents[slot])
        nodes.append(
            [
                int(tree.ids[slot]),
                NO_NODE if parent == NO_NODE else int(tree.ids[parent]),
                int(tree.tokens[slot]),
                int(tree.positions[slot]),
                round(float(tree.logprobs[slot]), _DIGITS),
                int(tree.origins[slot]),
            ]
        )
    return nodes


class ObservedExecutor:
    """Wraps an executor and records its calls in a ``RunTrace``.

    Attributes:
        latency, in_flight, counters, hidden: of the wrapped executor.
    """

    def __init__(self, *, executor: Executor, trace: RunTrace) -> None:
        """Wraps ``executor``."""
        self._inner = executor
        self._trace = trace
        self.latency, self.in_flight = executor.latency, executor.in_flight
        self.counters = executor.counters
        self.hidden = executor.hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # optional members

    @property
    def wakeup(self) -> threading.Event | None:
        """That of the wrapped executor, if it has one."""
        event: threading.Event | None = self._inner.wakeup  # type: ignore[attr-defined]
        return event

    @wakeup.setter
    def wakeup(self, event: threading.Event | None) -> None:
        self._inner.wakeup = event  # type: ignore[attr-defined]

    def open(self, request: RequestState) -> None:
        """Records and opens a request."""
        self._trace.trees.open(request)
        self._inner.open(request)

    def submit(self, batch: Batch) -> None:
        """Records and submits a batch."""
        self._trace.trees.submit(self._trace.step, batch)
        self._inner.submit(batch)

    def ready(self) -> bool:
        """Calls the wrapped executor."""
        return self._inner.ready()

    def due_s(self) -> float | None:
        """Calls the wrapped executor."""
        return self._inner.due_s()

    def collect(self, *, wait: bool = True) -> Output:
        """Collects the output and records the trees."""
        output = self._inner.collect(wait=wait)
        trace = self._trace
        trace.trees.collect(trace.step, trace.clock.now() - trace.began_s, output)
        return output

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        """Records and applies the commits, which ends the step."""
        self._trace.trees.commit(self._trace.step, commits)
        self._inner.commit(commits, output)
        self._trace.timeline.step += 1

    def close(self, request_id: int) -> None:
        """Stops recording a request and closes it."""
        self._trace.trees.close(request_id)
        self._inner.close(request_id)

    def shutdown(self) -> None:
        """Calls the wrapped executor."""
        self._inner.shutdown()


class RunTrace:
    """The trace of a run.

    Attributes:
        clock: the controller's clock.
        timeline: spans of this process, and the loop's current step.
        trees: growth of the trees.
        began_s, began_step: clock time and step at which the record begins.
    """

    def __init__(self, clock: Clock) -> None:
        """Starts recording; ``clock`` must have a timeline."""
        assert clock.timeline is not None, "a traced run's clock has a timeline"
        self.clock = clock
        self.timeline: Timeline = clock.timeline
        self.trees = TreeRecorder()
        self.began_s, self.began_step = clock.now(), 0
        self._run_step = 0
        self._gathered: list[Span] = []
        self._dropped: dict[int, int] = {}

    def clear(self) -> None:
        """Restarts the record, after a warm-up."""
        self.timeline.take()
        self.trees.clear()
        self._gathered.clear()
        self.began_s, self.began_step = self.clock.now(), self.timeline.step

    @property
    def step(self) -> int:
        """Iterations of the loop since the record began."""
        return self.timeline.step - self.began_step

    def begin_run(self, reports: Sequence[ClockReport]) -> None:
        """Marks the start of a run of the loop; spans in ``reports`` precede it and are dropped."""
        self._run_step = self.timeline.step
        for report in reports:
            self._dropped[report.rank] = report.dropped

    def end_run(self, reports: Sequence[ClockReport]) -> None:
        """Adds the spans of ranks with wall clocks; the controller's report comes first.

        Time axes are aligned by the time of day at which each rank's clock started. Workers number
        steps from the start of each run.
        """
        for report in reports:
            shift = report.origin_s - reports[0].origin_s
            base = 0 if report is reports[0] else self._run_step
            self._gathered += [
                replace(s, start_s=s.start_s + shift, step=s.step + base) for s in report.spans
            ]
            self._dropped[report.rank] = report.dropped
        if len(self._gathered) > MAX_SPANS:
            self._dropped[-1] = self._dropped.get(-1, 0) + len(self._gathered) - MAX_SPANS
            del self._gathered[MAX_SPANS:]

    @property
    def num_dropped(self) -> int:
        """Number of spans that were counted but not recorded."""
        here = 0 if self._dropped else self.timeline.dropped
        return here + sum(self._dropped.values())

    def spans(self) -> list[Span]:
        """Spans of all ranks, ordered by time; time starts at the beginning of the record."""
        shifted = [
            replace(s, start_s=s.start_s - self.began_s, step=s.step - self.began_step)
            for s in (*self._gathered, *self.timeline.spans)
        ]
        return sorted((s for s in shifted if s.start_s >= 0), key=lambda s: (s.start_s, s.rank))
