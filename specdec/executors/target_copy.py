"""One of several copies of the target: the state of its caches, and the batch being computed.

The controller keeps a record of a copy's caches, which needs no messages: a batch brings the
missing entries of its paths, and commits have the same effect on the record as on the caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np

from specdec.clocks import Clock
from specdec.interfaces import Executor
from specdec.state import RequestState, tree_rows
from specdec.types import Answers, Batch, BoolArray, Commit, IntArray, Output, PrefillChunk


@dataclass(slots=True)
class CachedRequest:
    """A request in a copy's cache: the first ``cached_len`` committed tokens, and nodes."""

    request: RequestState
    cached_len: int = 0
    nodes: set[int] = field(default_factory=set)

    def commit(self, commit: Commit) -> None:
        """Retired nodes extend the committed tokens; pruned ones are dropped."""
        position = commit.prefix_len - len(commit.retired_ids)
        for node_id in commit.retired_ids.tolist():
            self.cached_len += node_id in self.nodes and self.cached_len == position
            position += 1
        self.nodes &= set(commit.kept_ids.tolist())

    def has(self, ids: IntArray) -> BoolArray:
        """bool[n]: which nodes are cached."""
        return np.array([node_id in self.nodes for node_id in ids.tolist()], np.bool_)


class TargetCopy:
    """One copy, and the record of its caches."""

    def __init__(self, executor: Executor, clock: Clock, rank: int | None) -> None:
        """``rank``: clock rank of a copy in this process; None for a remote one."""
        self.executor = executor
        self.is_busy = False
        self.due_s: float | None = None
        self._clock, self._rank = clock, rank
        self._cached: dict[int, CachedRequest] = {}
        self._requested: dict[int, IntArray] = {}  # request -> nodes of the current batch
        self._output: Output | None = None
        self._deferred: list[Sequence[Commit]] = []
        self._opened_since: set[int] = set()  # requests unknown to the process of a busy copy

    def open(self, request: RequestState) -> None:
        """Allocates the request's cache."""
        self.executor.open(request)
        self._cached[request.id] = CachedRequest(request)
        if self.is_busy:
            self._opened_since.add(request.id)

    def close(self, request_id: int) -> None:
        """Frees the request's cache, and drops its deferred commits."""
        self.executor.close(request_id)
        self._cached.pop(request_id, None)
        self._requested.pop(request_id, None)
        self._opened_since.discard(request_id)
        self._deferred = [
            [commit for commit in commits if commit.request != request_id]
            for commits in self._deferred
        ]

    def start(self, batch: Batch) -> None:
        """Computes a batch, or starts it in the copy's process."""
        self._catch_up(batch.step)
        self.is_busy = True
        self._requested = {rows.request: rows.node_ids for rows in batch.trees}
        whole = self._completed(batch)
        with nullcontext() if self._rank is None else self._clock.on(self._rank):
            self.executor.submit(whole)
            if self._rank is not None:
                self._output = self.executor.collect()
        if self._rank is not None:
            self.due_s = self._clock.ends_s(self._rank)

    def ready(self) -> bool:
        """Whether the copy has answers."""
        if not self.is_busy:
            return False
        if self._rank is None:
            return bool(self.executor.ready())
        return self.due_s is None or self.due_s <= self._clock.now()

    def finish(self) -> list[Answers]:
        """The answers to the nodes of the batch, without those of ancestors added to it."""
        output = self.executor.collect() if self._output is None else self._output
        self.is_busy, self._output, self.due_s = False, None, None
        if self._rank is None:
            self.executor.commit(self._of_this_step(), output)
        return [
            _only(a, self._requested[a.request])
            for a in output.answers
            if a.request in self._requested
        ]

    def commit(self, commits: Sequence[Commit]) -> None:
        """Applies commits to the record; the caches follow when the copy is free."""
        for commit in commits:
            if commit.request in self._cached:
                self._cached[commit.request].commit(commit)
        if self._rank is None:
            self._deferred.append(commits)
        else:  # its batch is computed already
            self.executor.commit(commits, Output(step=commits[0].step))

    def _of_this_step(self) -> Sequence[Commit]:
        """The first deferred commits; those of requests that the process learns of later stay."""
        commits = self._deferred.pop(0) if self._deferred else ()
        since, self._opened_since = self._opened_since, set()
        late = [commit for commit in commits if commit.request in since]
        if late:
            self._deferred.insert(0, late)
        return [commit for commit in commits if commit.request not in since]

    def _catch_up(self, step: int) -> None:
        """Applies commits of earlier steps, one empty batch per step."""
        for commits in self._deferred:
            if commits:
                self.executor.submit(Batch(step=step))
                self.executor.commit(commits, self.executor.collect())
        self._deferred = []

    def _completed(self, batch: Batch) -> Batch:
        """The batch with the committed tokens and ancestors that are missing in the cache."""
        trees, prefills = [], []
        for rows in batch.trees:
            cached = self._cached[rows.request]
            request, start = cached.request, cached.cached_len
            tree = request.tree
            if start < request.prefix_len:
                missing = request.tokens[start : request.prefix_len]
                prefills.append(PrefillChunk(request=request.id, start=start, tokens=missing))
                cached.cached_len = request.prefix_len
            slots = tree.with_missing_ancestors(tree.slots(rows.node_ids), cached.has)
            cached.nodes.update(tree.ids[slots].tolist())
            trees.append(tree_rows(request, slots))
        return Batch(step=batch.step, trees=tuple(trees), prefills=tuple(prefills))


def _only(answers: Answers, ids: IntArray) -> Answers:
    """The answers to the nodes ``ids``."""
    rows = np.flatnonzero(np.isin(answers.node_ids, ids))
    return Answers(
        request=answers.request,
        node_ids=answers.node_ids[rows],
        tokens=answers.tokens[rows],
        probs=None if answers.probs is None else answers.probs[rows],
    )
