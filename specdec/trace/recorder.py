"""What a traced run remembers: the trees step by step, and what each step fed.

The hook is an executor around the run's own. It sees every call that the loop makes on an executor,
which is all there is to see: ``submit`` what is fed, ``collect`` the trees as the step has grown
them, ``commit`` what was decided. Without a trace nothing is wrapped and nothing costs anything.
"""

from __future__ import annotations

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
"""Steps whose trees are recorded; a run goes on beyond them, its trace says that it was cut."""

_DIGITS = 6  # of log probabilities and seconds in the file


@dataclass(slots=True)
class _Followed:
    """A request and what of its tree is on record.

    Attributes:
        request: its state.
        record: what the file will hold of it.
        last_id: newest node on record.
        submitted: ids fed in the present step.
    """

    request: RequestState
    record: dict[str, Any]
    last_id: int = NO_NODE
    submitted: list[int] = field(default_factory=list)


class TreeRecorder:
    """Follows trees through a run.

    Attributes:
        requests: per request, in order of admission: ``id``, ``prefix_len`` (tokens before the
            first root) and ``steps``. A step has ``step``, ``time_s`` (at its end), ``nodes`` (made
            in it: id, parent's id, token, position, log probability, origin), ``submitted`` (ids),
            ``answers`` ([id, token] pairs) and ``commit`` (None, or ``kind``, ``retired`` ids,
            ``next_token``, ``root`` id). Which nodes survive a commit follows: the new root and
            what is under it.
        fed: step -> what it submitted: ``requests``, ``depths`` (least and greatest below the
            root), ``nodes``, ``prefill`` (prompt tokens).
        truncated: whether steps were left out.
    """

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.fed: dict[int, dict[str, Any]] = {}
        self.truncated = False
        self._followed: dict[int, _Followed] = {}
        self._num_steps = 0

    def clear(self) -> None:
        """Forgets what is on record; requests that are open are not followed any further."""
        self.requests.clear()
        self.fed.clear()
        self._followed.clear()
        self.truncated, self._num_steps = False, 0

    def open(self, request: RequestState) -> None:
        """Starts to follow a request."""
        steps: list[dict[str, Any]] = []
        record = {"id": request.id, "prefix_len": request.prefix_len, "steps": steps}
        self.requests.append(record)
        self._followed[request.id] = _Followed(request, record)

    def submit(self, step: int, batch: Batch) -> None:
        """Notes what a step feeds."""
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
            if rows.request in self._followed:
                self._followed[rows.request].submitted = rows.node_ids.tolist()

    def collect(self, step: int, time_s: float, output: Output) -> None:
        """Notes the trees as they stand at the end of a step, before anything is decided."""
        self._num_steps += 1
        if self._num_steps > MAX_STEPS:
            self.truncated = True
            return
        answers = {a.request: a for a in output.answers}
        for request_id, followed in self._followed.items():
            nodes = _new_nodes(followed)
            answer = answers.get(request_id)
            if not (nodes or followed.submitted or answer):
                continue
            pairs = zip(answer.node_ids, answer.tokens, strict=True) if answer else ()
            followed.record["steps"].append(
                {
                    "step": step,
                    "time_s": round(time_s, _DIGITS),
                    "nodes": nodes,
                    "submitted": followed.submitted,
                    "answers": [[int(i), int(token)] for i, token in pairs],
                    "commit": None,
                }
            )
            followed.submitted = []

    def commit(self, step: int, commits: Sequence[Commit]) -> None:
        """Notes what a step decided."""
        for commit in commits:
            followed = self._followed.get(commit.request)
            steps = followed.record["steps"] if followed is not None else ()
            if steps and steps[-1]["step"] == step:
                steps[-1]["commit"] = {
                    "kind": commit.kind.value,
                    "retired": commit.retired_ids.tolist(),
                    "next_token": int(commit.next_token),
                    "root": int(commit.root_id),
                }

    def close(self, request_id: int) -> None:
        """Follows a request no further."""
        self._followed.pop(request_id, None)


def _new_nodes(followed: _Followed) -> list[list[Any]]:
    """The nodes made since the last look; ids grow, so they are at the end."""
    tree = followed.request.tree
    first = int(tree.ids.searchsorted(followed.last_id, side="right"))
    followed.last_id = int(tree.ids[-1])
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
    """An executor whose calls are written down on their way to it.

    Attributes:
        latency, counters, hidden_layers: those of the executor inside.
    """

    def __init__(self, *, executor: Executor, trace: RunTrace) -> None:
        """Wraps ``executor``; ``trace`` is told of every call."""
        self._inner = executor
        self._trace = trace
        self.latency = executor.latency
        self.counters = executor.counters
        self.hidden_layers = executor.hidden_layers

    def open(self, request: RequestState) -> None:
        """A request begins."""
        self._trace.trees.open(request)
        self._inner.open(request)

    def submit(self, batch: Batch) -> None:
        """What the step feeds."""
        self._trace.trees.submit(self._trace.step, batch)
        self._inner.submit(batch)

    def ready(self) -> bool:
        """As inside."""
        return self._inner.ready()

    def collect(self) -> Output:
        """The end of the step's computation: trees as they have grown."""
        output = self._inner.collect()
        trace = self._trace
        trace.trees.collect(trace.step, trace.clock.now() - trace.began_s, output)
        return output

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        """What was decided; the last call of a step."""
        self._trace.trees.commit(self._trace.step, commits)
        self._inner.commit(commits, output)
        self._trace.timeline.step += 1

    def close(self, request_id: int) -> None:
        """A request has ended."""
        self._trace.trees.close(request_id)
        self._inner.close(request_id)

    def shutdown(self) -> None:
        """As inside."""
        self._inner.shutdown()


class RunTrace:
    """All that a traced run has on record.

    Attributes:
        clock: the controller's.
        timeline: the spans of this process, and the step that the loop is in.
        trees: the trees' growth.
        began_s, began_step: when the record begins, on the clock and in steps.
    """

    def __init__(self, clock: Clock) -> None:
        """Takes a clock that has a timeline."""
        assert clock.timeline is not None, "a traced run's clock has a timeline"
        self.clock = clock
        self.timeline: Timeline = clock.timeline
        self.trees = TreeRecorder()
        self.began_s, self.began_step = clock.now(), 0
        self._run_step = 0
        self._gathered: list[Span] = []
        self._dropped: dict[int, int] = {}

    def clear(self) -> None:
        """Begins anew: what came before was a warm-up."""
        self.timeline.take()
        self.trees.clear()
        self._gathered.clear()
        self.began_s, self.began_step = self.clock.now(), self.timeline.step

    @property
    def step(self) -> int:
        """Turns of the loop since the record began."""
        return self.timeline.step - self.began_step

    def begin_run(self, reports: Sequence[ClockReport]) -> None:
        """A run of the loop begins; what ranks hand in here is older than that, and left out."""
        self._run_step = self.timeline.step
        for report in reports:
            self._dropped[report.rank] = report.dropped

    def end_run(self, reports: Sequence[ClockReport]) -> None:
        """Takes over what ranks with wall clocks hand in, the controller's report first.

        Time axes are laid beside the controller's by the time of day at which each began. Workers
        know the loop's own step, which starts again with every run.
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
        """Spans that were only counted."""
        here = 0 if self._dropped else self.timeline.dropped
        return here + sum(self._dropped.values())

    def spans(self) -> list[Span]:
        """The spans of all ranks on one time axis that begins with the record, in order of time."""
        found = [*self._gathered, *self.timeline.spans]
        moved = [
            replace(s, start_s=s.start_s - self.began_s, step=s.step - self.began_step)
            for s in found
        ]
        return sorted((s for s in moved if s.start_s >= 0), key=lambda s: (s.start_s, s.rank))
