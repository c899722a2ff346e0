"""Staged speculative decoding (arXiv 2308.04623): an n-gram model speeds up the draft itself.

Token tree (section 3.1): the paper states no shape; the preset's has second choices near the root,
where acceptance is likeliest. Second stage (section 3.2): a Katz back-off model counted from
samples of the draft; the tree is the one that the draft alone would have built. Deviation: the
preset's verifier is ``match`` instead of the paper's rejection.

The draft and the cheaper source work in a *scratch tree* beside the request's real tree. The
scratch tree has the same committed tokens, and the nodes that the draft has computed: expanded
nodes of the real tree, and guesses that are not in it. Real and scratch nodes are matched by their
token path from the root, so the result of a guess is available when a policy creates the real node.

Shape letters: W nodes, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from operator import itemgetter

import numpy as np

from specdec.interfaces import TokenSource
from specdec.parts.fields import Count, validated
from specdec.policies.tree_growth import as_nodes
from specdec.sources.candidate_cache import CandidateCache
from specdec.sources.combined import CombinedSource, WrappedSource
from specdec.state import DecodeState, RequestState
from specdec.tree import TokenTree
from specdec.types import NO_NODE, Candidates, Commit, CommitKind, IntArray, Nodes, Output

_DEFAULT_CHILDREN = 16


class StagedSource(CombinedSource):
    """Returns the same candidates as its draft, with fewer passes of the draft.

    When the draft must run, the cheaper source first guesses which nodes below the expanded ones
    will be expanded next; the draft computes these guesses in the same pass, in a scratch tree. If
    the policy later creates a guessed node, its candidates are already known. All candidates are
    the draft's own, so the real tree equals the tree of the draft alone.

    The cheaper source may be staged itself: 20B, 1B, 50M, n-gram (the paper's future work 2).
    Neither source may be used elsewhere.

    Args:
        guess_width: maximum number of guesses below each node.
        guess_depth: levels of guesses below the nodes that the draft must expand.
        guess_rows: maximum number of guesses per pass and request, the most probable ones.
        max_children: number of candidates requested from the draft; a call for more discards the
            results stored so far. Default: 16, or 1 if candidates are sampled.

    ``counters`` are sums over both sources; ``counters.by_level`` has the draft's models first.
    """

    @validated
    def __init__(
        self,
        *,
        draft: TokenSource,
        cheap: TokenSource,
        guess_width: Count = 2,
        guess_depth: Count = 3,
        guess_rows: Count = 5,
        max_children: Count | None = None,
    ) -> None:
        if max_children is None:
            max_children = 1 if draft.gives_probs else _DEFAULT_CHILDREN
        self._draft = CachedSource(source=draft, k=max_children, extended=self._with_guesses)
        self._cheap = CachedSource(source=cheap)
        super().__init__([self._draft, self._cheap])
        self.gives_probs, self.vocab_size = draft.gives_probs, draft.vocab_size
        if self.needs.real_nodes:
            raise ValueError(
                "a staged source expands nodes of scratch trees, which the executor does not have,"
                " so it cannot contain a source that reads the target's hidden states"
                " (source=medusa, source=early_exit): use source=mixture"
            )
        self._width = guess_width
        self._depth = guess_depth
        self._rows = guess_rows
        self._requests: dict[int, ScratchRequest] = {}

    def open(self, request: RequestState) -> None:
        self._requests[request.id] = scratch = ScratchRequest(request)
        super().open(scratch)

    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        """Returns the draft's candidates; the draft runs only for nodes not computed yet."""
        return self._draft.expand(self.scratch_state(state), self.located(nodes), k)

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        """Moves the scratch trees, and commits on both sources in scratch ids.

        ``output`` is passed unchanged; its node ids are those of the real trees.
        """
        scratch_commits = []
        for commit in commits:
            scratch = self._requests.get(commit.request)
            moved = None if scratch is None else scratch.commit(commit)
            if moved is not None:
                scratch_commits.append(moved)
        super().commit(scratch_commits, output)

    def close(self, request_id: int) -> None:
        super().close(request_id)
        self._requests.pop(request_id, None)

    # Scratch trees.

    def located(self, nodes: Nodes) -> Nodes:
        """Returns the nodes' counterparts in the scratch trees; missing ones are created."""
        return Nodes(tuple((i, self._requests[i].scratch_ids(ids)) for i, ids in nodes.items))

    def scratch_state(self, state: DecodeState) -> DecodeState:
        scratch = copy(state)
        scratch.requests = {**self._requests}
        return scratch

    def _with_guesses(self, state: DecodeState, missing: Nodes) -> Nodes:
        guesses = [_Guesses(self._requests[i], ids, self._rows) for i, ids in missing.items]
        for _ in range(self._depth):
            growing = [g for g in guesses if g.frontier]
            if not growing:
                break
            nodes = as_nodes((g.request, g.slots()) for g in growing)
            candidates = self._cheap.expand(state, nodes, self._width)
            for guess, (_, _, rows) in zip(growing, nodes.packed(), strict=True):
                guess.grow(candidates, rows.start)
        return as_nodes((g.request, g.selected()) for g in guesses)


class _Guesses:
    """Grows one request's guesses level by level, and keeps the most probable ones.

    It uses plain Python numbers: for a few guesses, array calls would cost more than the saved pass
    of a small draft. The next level grows below the nodes in ``frontier``.
    """

    def __init__(self, request: ScratchRequest, ids: IntArray, max_rows: int) -> None:
        self.request = request
        slots = request.tree.slots(ids).tolist()
        self.frontier = [(0.0, slot) for slot in slots]  # (minus the score, slot)
        self._expanding = frozenset(slots)
        self._max_rows = max_rows
        self._best: list[tuple[float, int]] = []  # likewise, best first

    def slots(self) -> IntArray:
        return np.array([slot for _, slot in self.frontier])

    def grow(self, candidates: Candidates, start: int) -> None:
        """Creates nodes from the best candidates of the frontier, rows ``start`` and following.

        A candidate that is not among the best of all guesses so far is dropped with everything
        below it: a child's score is at most its parent's.
        """
        ranked: list[tuple[float, int, int | None]] = [(*entry, None) for entry in self._best]
        for row, (score, slot) in enumerate(self.frontier, start):
            count = int(candidates.counts[row])
            logprobs = candidates.logprobs[row, :count].tolist()
            tokens = candidates.tokens[row, :count].tolist()
            ranked += [(score - p, slot, t) for p, t in zip(logprobs, tokens, strict=True)]
        ranked.sort(key=itemgetter(0))  # stable: of equal guesses the shallower first
        self._best, self.frontier = [], []
        for score, slot, token in ranked[: self._max_rows]:
            if token is not None:
                slot = self.request.child(slot, token)
                if slot in self._expanding:  # one expanded node may be below another
                    continue
                self.frontier.append((score, slot))
            self._best.append((score, slot))

    def selected(self) -> IntArray:
        """Returns the sorted slots of the expanded nodes and the best guesses, parents included."""
        return np.array(sorted([*self._expanding, *(slot for _, slot in self._best)]))


class ScratchRequest(RequestState):
    """A request as the wrapped sources see it: the real request's tokens with its scratch tree."""

    def __init__(self, request: RequestState) -> None:
        self._real = request
        self.id = request.id
        self.sampling = request.sampling
        self.stop = request.stop
        self.num_prompt = request.num_prompt
        tree = request.tree
        self.tree = TokenTree(token=int(tree.tokens[0]), position=int(tree.positions[0]))
        self._scratch_of = {tree.root_id: self.tree.root_id}  # real id -> scratch id
        self._last_step = -1

    @property
    def tokens(self) -> IntArray:
        return self._real.tokens

    @property
    def prefix_len(self) -> int:
        return self._real.prefix_len

    def scratch_ids(self, real_ids: IntArray) -> IntArray:
        """Returns int64[W]: for each node of the real tree, the id of its counterpart in the
        scratch tree; missing counterparts are created.
        """
        return np.array([self._scratch_id(real_id) for real_id in real_ids.tolist()], np.int64)

    def child(self, slot: int, token: int) -> int:
        """Returns the slot of the child with the token, which is created if missing."""
        child = self.tree.child(slot, token)
        if child == NO_NODE:
            child = int(self.tree.append(np.array([slot]), np.array([token]), np.zeros(1))[0])
        return child

    def commit(self, commit: Commit) -> Commit | None:
        """Moves the scratch root; returns the commit in scratch ids, None if applied before."""
        if commit.step <= self._last_step:
            return None
        self._last_step = commit.step
        tree = self.tree
        path = [0]
        for token in commit.retired_tokens[1:].tolist():
            path.append(self.child(path[-1], token))
        retired = tree.ids[path]
        root = tree.child(path[-1], commit.next_token)
        if root == NO_NODE:
            kind = CommitKind.MISS
            tree.reset(token=commit.next_token, position=int(tree.positions[path[-1]]) + 1)
        else:
            kind = CommitKind.HIT
            tree.reroot(root)
        kept = tree.ids.copy()
        live = set(kept.tolist())
        self._scratch_of = {r: s for r, s in self._scratch_of.items() if s in live}
        self._scratch_of[commit.root_id] = tree.root_id
        return replace(commit, kind=kind, retired_ids=retired, root_id=tree.root_id, kept_ids=kept)

    def _scratch_id(self, real_id: int) -> int:
        """Returns the scratch id of a real node; creates the missing part of its path."""
        if real_id not in self._scratch_of:
            real = self._real.tree
            slot = int(real.live_slots(np.array([real_id]))[0])
            above = np.array([self._scratch_id(int(real.ids[real.parents[slot]]))])
            child = self.child(int(self.tree.slots(above)[0]), int(real.tokens[slot]))
            self._scratch_of[real_id] = int(self.tree.ids[child])
        return self._scratch_of[real_id]


class CachedSource(WrappedSource):
    """Wraps a source so that a live node is expanded only once, however often it is requested.

    A staged source requests the same guesses whenever they are close to the nodes that its draft
    computes. Empty rows are not cached: the source may have a proposal later.

    Args:
        k: candidates per node requested from the source; a call for more empties the cache.
        extended: adds further nodes to those that the source must expand.
    """

    def __init__(
        self,
        *,
        source: TokenSource,
        k: int = 1,
        extended: Callable[[DecodeState, Nodes], Nodes] = lambda _, nodes: nodes,
    ) -> None:
        super().__init__(source)
        self._cache, self._k, self._extended = CandidateCache(), k, extended

    def open(self, request: RequestState) -> None:
        self._cache.open(request.id)
        super().open(request)

    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        if k > self._k:
            self._k = k
            self._cache.clear()
        missing = self._cache.missing(nodes)
        if missing.items:
            computed = self._extended(state, missing)
            self._cache.keep(computed, self._source.expand(state, computed, self._k))
        return self._cache.recall(nodes, k)

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        self._cache.commit(commits)
        super().commit(commits, output)

    def close(self, request_id: int) -> None:
        self._cache.close(request_id)
        super().close(request_id)
