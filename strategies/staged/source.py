"""A draft sped up by a cheaper source (Staged Speculative Decoding, 3.2), to any depth.

Shape letters: W nodes, K candidates, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from specdec.device import on_host
from specdec.interfaces import TokenSource
from specdec.metrics.counters import SourceCounters
from specdec.parts.fields import Count, validated
from specdec.sources.candidate_cache import CachedSource
from specdec.sources.combined import joined_needs, tally
from specdec.types import Candidates, Commit, IntArray, Nodes, Output
from strategies.staged.scratch_tree import ScratchRequest

if TYPE_CHECKING:
    from specdec.state import DecodeState, RequestState

_DEFAULT_CHILDREN = 16


class StagedSource:
    """Answers as its draft would, in fewer passes of it.

    When the draft must run for some nodes, the cheaper source first guesses which nodes will be
    asked for next, below them; the draft computes the guesses in the same pass, in a scratch tree.
    When the policy then makes a node of the draft's candidates that had been guessed, its answer is
    there. Every answer is the draft's own, so the real tree is the one the draft alone would have
    built (with a draft that has ``guess_draw``, up to the agreement it has measured so far, on
    which the scores depend).

    The cheaper source may be staged itself: 20B, 1B, 50M, n-gram (the paper's future work 2).

    Attributes:
        cheap: the cheaper source, to be asked about nodes of the real trees.
        counters: sums over both sources; ``by_level`` has the draft's levels first.
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
        """Wraps two sources, which must not be used otherwise.

        Args:
            draft: whose answers are given.
            cheap: guesses what they will be.
            guess_width: guesses under each node at most.
            guess_depth: levels of guesses under the nodes that the draft must run for.
            guess_rows: guesses per pass and request at most; the most probable ones are taken.
            max_children: candidates that the draft is asked for from the start, so that a later
                call for more of them finds them; by default 16, or 1 where candidates are sampled.
                A call for more than ever before makes what is computed count as unknown.

        Raises:
            ValueError: for sizes below 1, vocabularies that differ, or a source that has to be
                asked about nodes of the real trees.
        """
        if (
            None not in (draft.vocab_size, cheap.vocab_size)
            and draft.vocab_size != cheap.vocab_size
        ):
            raise ValueError(
                f"the draft's vocabulary has {draft.vocab_size} tokens, the cheaper source's"
                f" {cheap.vocab_size}; both need the target's tokenizer"
            )
        self.gives_probs: bool = getattr(draft, "gives_probs", False)
        self.vocab_size = draft.vocab_size
        self.needs = joined_needs([draft.needs, cheap.needs])
        if self.needs.real_nodes:
            raise ValueError(
                "a staged source works in trees of its own, whose nodes no executor knows, so it"
                " cannot hold one that reads the target's hidden states (source=medusa,"
                " source=early_exit): use source=mixture"
            )
        self.counters = SourceCounters()
        self._draft = draft
        self._cheap = CachedSource(source=cheap)
        self.cheap: TokenSource = _RealView(self, self._cheap)
        self._width = guess_width
        self._depth = guess_depth
        self._rows = guess_rows
        if max_children is None:
            max_children = 1 if self.gives_probs else _DEFAULT_CHILDREN
        self._k = max_children
        self._requests: dict[int, ScratchRequest] = {}
        self._state: DecodeState | None = None

    def open(self, request: RequestState) -> None:
        """Starts a scratch tree for the request, in which both sources work."""
        scratch = ScratchRequest(request)
        self._requests[request.id] = scratch
        for source in (self._draft, self._cheap):
            source.open(cast("RequestState", scratch))

    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        """The draft's candidates; runs it only for nodes whose answer is not there yet."""
        if k > self._k:
            self._k = k
            for scratch in self._requests.values():
                scratch.tree.expanded[:] = False
        asked = self._located(nodes)
        unknown = [(r, slots[~r.tree.expanded[slots]]) for r, slots in asked]
        unknown = [(r, slots) for r, slots in unknown if len(slots)]
        if unknown:
            scratch_state = self._scratch_state(state)
            self._run_draft(scratch_state, self._with_guesses(scratch_state, unknown))
            tally(self.counters, (self._draft.counters, self._cheap.counters))
        return self._answers(asked, k)

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        """Moves the scratch trees on and tells both sources, in scratch ids.

        ``output`` is passed on as it is: its node ids are those of the real trees.
        """
        moved = []
        for commit in commits:
            scratch = self._requests.get(commit.request)
            followed = None if scratch is None else scratch.commit(commit)
            if followed is not None:
                moved.append(followed)
        for source in (self._draft, self._cheap):
            source.commit(moved, output)

    def close(self, request_id: int) -> None:
        """Forgets the request."""
        self._requests.pop(request_id, None)
        for source in (self._draft, self._cheap):
            source.close(request_id)

    def ask_cheap(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        """What the cheaper source says about nodes of the real trees."""
        items = [(r.id, r.tree.ids[slots]) for r, slots in self._located(nodes)]
        candidates = self._cheap.expand(self._scratch_state(state), Nodes(tuple(items)), k)
        tally(self.counters, (self._draft.counters, self._cheap.counters))
        return candidates

    # ------------------------------------------------------------------ the scratch forest

    def _located(self, nodes: Nodes) -> list[tuple[ScratchRequest, IntArray]]:
        """(request, int64[W] scratch slots) of real nodes."""
        found = []
        for request_id, ids in nodes.items:
            scratch = self._requests[request_id]
            found.append((scratch, scratch.slots(ids)))
        return found

    def _scratch_state(self, state: DecodeState) -> DecodeState:
        """The run's state with scratch requests in place of the real ones."""
        if self._state is None or self._state.draws is not state.draws:
            self._state = type(state)(draws=state.draws, clock=state.clock, meter=state.meter)
            self._state.requests = cast("dict[int, RequestState]", self._requests)
        self._state.step = state.step
        return self._state

    def _with_guesses(
        self, state: DecodeState, unknown: list[tuple[ScratchRequest, IntArray]]
    ) -> list[tuple[ScratchRequest, IntArray]]:
        """The unknown nodes and the most probable guesses below them, sorted slots per request."""
        guesses = [_Guesses(request, slots, self._rows) for request, slots in unknown]
        for _ in range(self._depth):
            growing = [g for g in guesses if g.frontier]
            if not growing:
                break
            nodes = Nodes(tuple((g.request.id, g.request.tree.ids[g.frontier]) for g in growing))
            candidates = self._cheap.expand(state, nodes, self._width)
            start = 0
            for guess in growing:
                stop = start + len(guess.frontier)
                guess.grow(candidates, start)
                start = stop
        return [(g.request, g.chosen()) for g in guesses]

    def _run_draft(self, state: DecodeState, wanted: list[tuple[ScratchRequest, IntArray]]) -> None:
        nodes = Nodes(tuple((r.id, r.tree.ids[slots]) for r, slots in wanted))
        candidates = self._draft.expand(state, nodes, self._k)
        start = 0
        for request, slots in wanted:
            stop = start + len(slots)
            request.tree.set_candidates(slots, candidates, slice(start, stop))
            start = stop

    def _answers(self, asked: list[tuple[ScratchRequest, IntArray]], k: int) -> Candidates:
        """What the scratch trees know about the nodes, at most ``k`` children each."""
        tokens, logprobs, probs = [], [], []
        width = min([k, *(r.tree.candidate_tokens.shape[1] for r, _ in asked)])
        for request, slots in asked:
            tree = request.tree
            tokens.append(tree.candidate_tokens[slots, :width])
            logprobs.append(tree.candidate_logprobs[slots, :width])
            if self.gives_probs:
                uniform = np.full(self.vocab_size or 1, 1.0 / (self.vocab_size or 1))
                probs += [tree.draft_probs.get(i, uniform) for i in tree.ids[slots].tolist()]
        scores = np.concatenate(logprobs)
        return Candidates(
            tokens=np.concatenate(tokens),
            logprobs=scores,
            counts=(scores > -np.inf).sum(axis=1),
            probs=np.stack([on_host(row) for row in probs]) if probs else None,
        )


class _Guesses:
    """Grows one request's guesses level by level, keeping the most probable of them.

    A handful of guesses at a time: plain numbers, since array calls would cost more than a pass of
    a small draft saves.

    Attributes:
        request: whose scratch tree.
        frontier: slots whose children come next.
    """

    def __init__(self, request: ScratchRequest, slots: IntArray, max_rows: int) -> None:
        self.request = request
        self.frontier: list[int] = slots.tolist()
        self._scores = [0.0] * len(slots)
        self._asked = frozenset(self.frontier)
        self._max_rows = max_rows
        self._kept: list[tuple[float, int]] = []  # (minus the score, slot), best first

    def grow(self, candidates: Candidates, start: int) -> None:
        """Makes nodes of the best candidates of the frontier, rows ``start`` and following.

        A candidate that is not among the best of all guesses so far is left out, and with it all
        that could come below: scores do not rise downwards.
        """
        ranked = [(score, -1, slot, 0) for score, slot in self._kept]  # ties: the shallower guess
        for row, (slot, score) in enumerate(zip(self.frontier, self._scores, strict=True), start):
            count = int(candidates.counts[row])
            logprobs = candidates.logprobs[row, :count].tolist()
            tokens = candidates.tokens[row, :count].tolist()
            ranked += [(-score - p, slot, t, 1) for p, t in zip(logprobs, tokens, strict=True)]
        ranked.sort(key=_by_score)
        best = ranked[: self._max_rows]
        fresh = [(score, slot, token) for score, slot, token, is_new in best if is_new]
        slots = self.request.children([entry[1] for entry in fresh], [entry[2] for entry in fresh])
        grown = [
            (score, slot)
            for (score, _, _), slot in zip(fresh, slots, strict=True)
            if slot not in self._asked  # nodes asked for together, one below the other
        ]
        self._kept = [(score, slot) for score, _, slot, is_new in best if not is_new] + grown
        self._kept.sort(key=_by_score)
        self.frontier = [slot for _, slot in grown]
        self._scores = [-score for score, _ in grown]

    def chosen(self) -> IntArray:
        """int64: sorted slots of the nodes asked for and the best guesses, none orphaned."""
        return np.array(sorted([*self._asked, *(slot for _, slot in self._kept)]))


def _by_score(entry: tuple[float, ...]) -> float:
    return entry[0]


class _RealView:
    """The cheaper source seen from outside: asked in real ids, answered in its scratch forest."""

    def __init__(self, owner: StagedSource, cheap: TokenSource) -> None:
        self._owner = owner
        self._cheap = cheap
        self.needs = cheap.needs
        self.vocab_size = cheap.vocab_size
        self.counters = cheap.counters
        self.gives_probs: bool = getattr(cheap, "gives_probs", False)

    def open(self, request: RequestState) -> None:
        """Nothing: its owner opens it."""

    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        """Asks the cheaper source about real nodes."""
        return self._owner.ask_cheap(state, nodes, k)

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        """Nothing: its owner tells it."""

    def close(self, request_id: int) -> None:
        """Nothing: its owner closes it."""
