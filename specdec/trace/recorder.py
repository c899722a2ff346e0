"""Records the trees and submissions of each step of a traced run, by wrapping its executor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from specdec.clocks import Clock, ClockReport, Span, Timeline
from specdec.clocks.interface import MAX_SPANS
from specdec.device import Probs, on_host
from specdec.interfaces import Executor
from specdec.state import RequestState
from specdec.types import NO_NODE, NO_TOKEN, Batch, Commit, FloatArray, IntArray, Output

MAX_STEPS = 4000  # steps beyond this number are not recorded; the run continues
_DIGITS = 6  # decimals of probabilities, their logarithms and seconds


class Judgement(NamedTuple):
    """How probable draft and target found a committed token; rank 1 is the most probable.

    The *top* candidate is the draft's most probable one. Optional fields are None if the draft has
    no candidates; ``top_target_*`` also if the run computes no target distribution.
    """

    rank: int  # of the token among the draft's candidates; 0 if it is not one
    candidates: int  # number of the draft's candidates; 0 if it had proposed none
    in_tree: bool  # whether the token was a child of the node
    draft_prob: float | None = None  # of the token; None if it is not a candidate
    top_prob: float | None = None  # draft probability of the top candidate
    top_target_prob: float | None = None  # target probability of the top candidate
    top_target_rank: int | None = None  # the target's rank of the top candidate


class Proposal(NamedTuple):
    tokens: IntArray  # [K], the draft's candidates
    logprobs: FloatArray  # [K]; -inf for those in the tree
    target: Probs | None  # float64[V]; None if the run does not compute it


_NO_PROPOSAL = Proposal(np.zeros(0, np.int64), np.zeros(0), None)


def judgement(proposal: Proposal, children: Mapping[int, float], token: int) -> Judgement:
    """Judges the token after a node; ``children`` maps its children's tokens to log draft probs."""
    pairs = zip(proposal.tokens.tolist(), proposal.logprobs.tolist(), strict=True)
    logprobs = {**children, **{k: v for k, v in pairs if v > -np.inf}, **children}
    if not logprobs:
        return Judgement(rank=0, candidates=0, in_tree=False)
    own, top = logprobs.get(token), max(logprobs, key=lambda other: logprobs[other])
    target = None if proposal.target is None else on_host(proposal.target)
    return Judgement(
        rank=0 if own is None else 1 + sum(value > own for value in logprobs.values()),
        candidates=len(logprobs),
        in_tree=token in children,
        draft_prob=None if own is None else round(float(np.exp(own)), _DIGITS),
        top_prob=round(float(np.exp(logprobs[top])), _DIGITS),
        top_target_prob=None if target is None else round(float(target[top]), _DIGITS),
        top_target_rank=None if target is None else 1 + int(np.count_nonzero(target > target[top])),
    )


@dataclass(slots=True)
class _OpenRequest:
    request: RequestState
    steps: list[dict[str, Any]]
    last_id: int = NO_NODE  # newest recorded node
    submitted: list[int] = field(default_factory=list)  # node ids of this step
    answers: list[list[int]] = field(default_factory=list)  # [id, token] of this step
    children: dict[int, dict[int, float]] = field(default_factory=dict)  # node -> token -> log prob
    proposals: dict[int, Proposal] = field(default_factory=dict)  # by answered node in the tree

    def new_nodes(self) -> list[list[Any]]:
        tree = self.request.tree
        new = slice(int(tree.ids.searchsorted(self.last_id, side="right")), len(tree))
        self.last_id = int(tree.ids[-1])
        parents = np.where(tree.parents[new] == NO_NODE, NO_NODE, tree.ids[tree.parents[new]])
        columns = (tree.ids[new], parents, tree.tokens[new], tree.positions[new])
        logprobs = [round(value, _DIGITS) for value in tree.logprobs[new].tolist()]
        origins = tree.origins[new].tolist()
        rows = zip(*(column.tolist() for column in columns), logprobs, origins, strict=True)
        nodes = [list(row) for row in rows]
        for _, parent, token, _, logprob, _ in nodes:
            self.children.setdefault(parent, {})[token] = logprob
        return nodes

    def judged(self, commit: Commit) -> list[list[Any]]:
        """Returns a ``Judgement`` as a list per committed token; forgets nodes not in the tree."""
        tokens = [*commit.retired_tokens[1:].tolist(), int(commit.next_token)]
        rows = [
            [*judgement(self.proposals.get(node, _NO_PROPOSAL), self.children.get(node, {}), token)]
            for node, token in zip(commit.retired_ids.tolist(), tokens, strict=True)
        ]
        alive = set(self.request.tree.ids.tolist())
        self.children = {i: value for i, value in self.children.items() if i in alive}
        self.proposals = {i: value for i, value in self.proposals.items() if i in alive}
        return rows


class ObservedExecutor(Executor):
    def __init__(self, *, executor: Executor, trace: RunTrace) -> None:
        self._inner, self._trace = executor, trace
        self._open: dict[int, _OpenRequest] = {}
        own = ("counters", "latency", "in_flight", "hidden", "early_hidden", "can_poll")
        for name in (*own, "ready", "due_s", "poll", "set_wakeup"):
            setattr(self, name, getattr(executor, name))

    def open(self, request: RequestState) -> None:
        entry = _OpenRequest(request, [])
        record = {"id": request.id, "prefix_len": request.prefix_len, "steps": entry.steps}
        self._trace.requests.append(record)
        self._open[request.id] = entry
        self._inner.open(request)

    def submit(self, batch: Batch) -> None:
        depths = [int(d) for rows in batch.trees for d in (rows.depths.min(), rows.depths.max())]
        if batch.num_tokens:
            requests = {rows.request for rows in batch.trees} | {c.request for c in batch.prefills}
            self._trace.fed[self._trace.timeline.step] = {
                "requests": sorted(requests),
                "depths": [min(depths), max(depths)] if depths else None,
                "nodes": batch.num_nodes,
                "prefill": batch.num_tokens - batch.num_nodes,
            }
        for rows in batch.trees:
            self._open[rows.request].submitted = rows.node_ids.tolist()
        self._inner.submit(batch)

    def collect(self, *, wait: bool = True) -> Output:
        output, trace = self._inner.collect(wait=wait), self._trace
        if trace.timeline.step >= MAX_STEPS:
            trace.truncated = True
            return output
        time_s = round(trace.clock.now() - trace.began_s, _DIGITS)
        for part in output.answers:
            if (entry := self._open.get(part.request)) is None:
                continue
            tree = entry.request.tree
            columns = (part.node_ids, part.tokens, tree.slots(part.node_ids))
            rows = zip(*(column.tolist() for column in columns), strict=True)
            for i, (node, token, slot) in enumerate(rows):
                if token != NO_TOKEN:
                    entry.answers.append([node, token])
                if slot >= 0:
                    tokens, logprobs = tree.candidate_tokens[slot], tree.candidate_logprobs[slot]
                    target = None if part.probs is None else part.probs[i]
                    entry.proposals[node] = Proposal(tokens.copy(), logprobs.copy(), target)
        for entry in self._open.values():
            nodes, submitted, answers = entry.new_nodes(), entry.submitted, entry.answers
            if nodes or submitted or answers:
                step = {"step": trace.timeline.step, "time_s": time_s, "nodes": nodes}
                step |= {"submitted": submitted, "answers": answers, "commit": None}
                entry.steps.append(step)
                entry.submitted, entry.answers = [], []
        return output

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        for commit in commits:
            entry = self._open[commit.request]
            steps, judged = entry.steps, entry.judged(commit)
            if steps and steps[-1]["step"] == self._trace.timeline.step:
                steps[-1]["commit"] = {
                    "kind": commit.kind.value,
                    "retired": commit.retired_ids.tolist(),
                    "next_token": int(commit.next_token),
                    "root": int(commit.root_id),
                    "judged": judged,
                }
        self._inner.commit(commits, output)
        self._trace.timeline.step += 1

    def close(self, request_id: int) -> None:
        self._open.pop(request_id, None)
        self._inner.close(request_id)


class RunTrace:
    """Collects spans of a run, how its trees grew, and what was submitted to the target.

    ``requests`` has per request, in order of admission: ``id``, ``prefix_len`` (tokens before the
    first root) and ``steps``. A step has ``step``, ``time_s`` (at its end), ``nodes`` (added in the
    step: id, parent id, token, position, log probability, origin), ``submitted`` (ids), ``answers``
    ([id, token] pairs) and ``commit`` (None, or ``kind``, ``retired`` ids: the old root and the
    accepted nodes, ``next_token``, ``root`` id, ``judged``: a ``Judgement``'s values per committed
    token). The new root and its descendants remain. ``fed`` maps a step to its submission: ids of
    ``requests``, ``depths`` ([least, largest]), numbers of ``nodes`` and ``prefill`` tokens.
    ``truncated``: whether steps were omitted. ``began_s``: the clock time at which step 0 begins.
    """

    def __init__(self, clock: Clock) -> None:
        assert clock.timeline is not None, "a traced run's clock has a timeline"
        self.clock = clock
        self.timeline: Timeline = clock.timeline
        self._run_step = 0
        self._gathered: list[Span] = []
        self._dropped: dict[int, int] = {}
        self.clear()

    def clear(self) -> None:
        self.timeline.take()
        self.requests: list[dict[str, Any]] = []
        self.fed: dict[int, dict[str, Any]] = {}
        self.truncated = False
        self._gathered.clear()
        self.began_s, self.timeline.step = self.clock.now(), 0

    def begin_run(self, reports: Sequence[ClockReport]) -> None:
        """Marks the start of a run of the loop; spans in ``reports`` are older and discarded."""
        self._run_step = self.timeline.step
        self._dropped |= {report.rank: report.dropped for report in reports}

    def end_run(self, reports: Sequence[ClockReport]) -> None:
        """Adds the spans of ranks with wall clocks, aligned by the time of day at which each clock
        started; the report of the controller (rank 0) must come first. Steps of other ranks, which
        count from the start of each run, are shifted.
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
        return sum(self._dropped.values()) if self._dropped else self.timeline.dropped

    def spans(self) -> list[Span]:
        spans = (*self._gathered, *self.timeline.spans)
        shifted = [replace(s, start_s=s.start_s - self.began_s) for s in spans]
        return sorted((s for s in shifted if s.start_s >= 0), key=lambda s: (s.start_s, s.rank))
