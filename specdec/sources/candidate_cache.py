"""Keeps a source's answers, for callers that ask about a node more than once.

Shape letters: W nodes, K candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from specdec.device import Probs, on_host
from specdec.interfaces import TokenSource
from specdec.types import (
    Candidates,
    Commit,
    CommitKind,
    FloatArray,
    IntArray,
    Nodes,
    Output,
)

if TYPE_CHECKING:
    from specdec.state import DecodeState, RequestState


@dataclass(frozen=True, slots=True)
class _Answer:
    """One node's row of ``Candidates``."""

    tokens: IntArray
    logprobs: FloatArray
    count: int
    probs: Probs | None


class CandidateCache:
    """Rows of ``Candidates`` by live node, to be handed out again and in any order."""

    def __init__(self) -> None:
        self._known: dict[int, dict[int, _Answer]] = {}

    def open(self, request_id: int) -> None:
        """Starts with nothing known."""
        self._known[request_id] = {}

    def missing(self, nodes: Nodes) -> Nodes:
        """The nodes that nothing is known of."""
        found = []
        for request_id, ids in nodes.items:
            known = self._known[request_id]
            new = [i for i in ids.tolist() if i not in known]
            if new:
                found.append((request_id, np.array(new, np.int64)))
        return Nodes(tuple(found))

    def keep(self, nodes: Nodes, answer: Candidates) -> None:
        """Takes an answer; rows of count 0 and those of requests that were closed are left out."""
        counts = answer.counts.tolist()
        row = 0
        for request_id, ids in nodes.items:
            known = self._known.get(request_id)
            for node_id in ids.tolist():
                if counts[row] and known is not None:
                    probs = None if answer.probs is None else answer.probs[row]
                    known[node_id] = _Answer(
                        answer.tokens[row], answer.logprobs[row], counts[row], probs
                    )
                row += 1

    def recall(self, nodes: Nodes, k: int) -> Candidates:
        """Up to ``k`` candidates per node; count 0 where nothing is known."""
        rows = [self._known[r].get(i) for r, ids in nodes.items for i in ids.tolist()]
        found = [row for row in rows if row is not None]
        if not found:
            return Candidates.empty(len(nodes))
        width = min(k, max(len(row.tokens) for row in found))
        blank = Candidates.empty(len(nodes), width)
        probs = None
        if found[0].probs is not None:
            probs = np.full((len(nodes), len(found[0].probs)), 1.0 / len(found[0].probs))
        for at, row in enumerate(rows):
            if row is not None:
                num = min(width, row.count)
                blank.tokens[at, :num] = row.tokens[:num]
                blank.logprobs[at, :num] = row.logprobs[:num]
                blank.counts[at] = num
                if probs is not None:
                    assert row.probs is not None
                    probs[at] = on_host(row.probs)
        return Candidates(
            tokens=blank.tokens, logprobs=blank.logprobs, counts=blank.counts, probs=probs
        )

    def commit(self, commits: Sequence[Commit]) -> None:
        """Forgets what left the trees."""
        for commit in commits:
            known = self._known.get(commit.request)
            if known and commit.kind is not CommitKind.NONE:
                kept = set(commit.kept_ids.tolist())
                self._known[commit.request] = {i: a for i, a in known.items() if i in kept}

    def clear(self) -> None:
        """Forgets every node; the requests stay open."""
        for known in self._known.values():
            known.clear()

    def close(self, request_id: int) -> None:
        """Forgets the request."""
        self._known.pop(request_id, None)


class CachedSource:
    """A source whose owner may ask about a live node again at no cost.

    Policies keep answers in the real trees and need none of this; a staged source asks the same
    guesses again whenever they are near what its draft has to run for. Count 0 is not kept: the
    source may have an answer later.
    """

    def __init__(self, *, source: TokenSource) -> None:
        """Wraps ``source``, which must not be asked by anybody else."""
        self.needs = source.needs
        self.vocab_size = source.vocab_size
        self.counters = source.counters
        self.gives_probs: bool = getattr(source, "gives_probs", False)
        self._source = source
        self._book = CandidateCache()
        self._k = 1

    def open(self, request: RequestState) -> None:
        """Starts with nothing known."""
        self._book.open(request.id)
        self._source.open(request)

    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        """Known rows from memory, the others from the source in one call."""
        if k > self._k:
            self._k = k
            self._book.clear()
        asked = self._book.missing(nodes)
        if not asked.items:
            return self._book.recall(nodes, k)
        answer = self._source.expand(state, asked, self._k)
        self._book.keep(asked, answer)
        if len(asked) == len(nodes) and answer.tokens.shape[1] <= k:
            return answer
        return self._book.recall(nodes, k)

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        """Forgets what left the trees."""
        self._book.commit(commits)
        self._source.commit(commits, output)

    def close(self, request_id: int) -> None:
        """Forgets the request."""
        self._book.close(request_id)
        self._source.close(request_id)
