"""Proposals of several exits of the target, one chosen for each token (PPSD B.3).

Shape letters: W nodes, K candidates, X exits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from specdec.device import on_host
from specdec.errors import UserError
from specdec.metrics.counters import SourceCounters
from specdec.parts.fields import Count, validated
from specdec.sampling.candidates import picked
from specdec.sources.candidate_cache import CandidateCache
from specdec.sources.early_exit import exit_pass_bytes, read_front
from specdec.sources.exit_laws import eesd_saving, ppsd_saving
from specdec.types import BoolArray, Candidates, Commit, CommitKind, IntArray, Needs, Nodes, Output

if TYPE_CHECKING:
    from specdec.executors.early_exit import ExitFront
    from specdec.sources.pair import SourcePair
    from specdec.state import DecodeState, RequestState


class MultiExitSource:
    """Takes each token from the first exit beyond which no other promises more.

    B.3 only names the idea; the rule is ours. An exit's *saving* is its expected acceptance
    (``ExitChances``) weighed against its depth as Eq. 6 does in a pipeline (``ppsd_saving``) and as
    Eq. 4 does where drafts are verified afterwards (``eesd_saving``). Exits are asked in order: one
    answers unless a later one is expected to save more, given how sure this one is.

    With ``executor=early_exit`` the later exit is computed only then, from where the node stands:
    no layer is passed twice. With ``executor=pipeline`` all exits are read in passing, and to
    decide for a later one is to feed nothing until it arrives.

    The choice looks at distributions and at what the target has decided, never at sampled
    candidates; where candidates are sampled (rejection verifiers) it does not learn either, so it
    is a function of the tokens before it alone, and the verifier stays unbiased.

    Attributes:
        layers: of the target before each exit.
        gives_probs: whether candidates are sampled and come with their whole distribution.
        counters: passes and rows by exit, see ``EarlyExitSource``.
    """

    @validated
    def __init__(
        self,
        *,
        pair: SourcePair,
        exit_front: Callable[[Sequence[int]], ExitFront] | None = None,
        further_exits: Sequence[Count] | None = None,
        candidates: Count = 16,
        sample: bool = False,
    ) -> None:
        """Composes the source.

        Args:
            pair, exit_front: see ``EarlyExitSource``.
            further_exits: number of layers before each exit after the pair's own; None for one
                exit at twice its depth.
            candidates: maximum tokens per node and exit that a pipeline returns.
            sample: sample candidates and return their distribution, for rejection verifiers.

        Raises:
            ValueError: fewer than one candidate.
            UserError: exits that do not rise, or are not inside the target.
        """
        self.layers = _exit_layers(pair, further_exits)
        self._front = None if exit_front is None else exit_front(self.layers)
        self._pair, self._num_layers = pair, pair.num_layers
        self.needs = Needs(real_nodes=True)
        self.counters = SourceCounters()
        if self._front is None:
            self.needs = Needs(exits=candidates, further_exits=self.layers[1:], real_nodes=True)
        else:
            self.counters = self._front.counters
        self.vocab_size: int | None = pair.vocab_size
        self.gives_probs = sample
        self._books = [CandidateCache() for _ in self.layers]
        self._said: dict[int, dict[int, dict[int, tuple[int, float]]]] = {}
        self._chances: dict[int, ExitChances] = {}

    @cached_property
    def pass_bytes(self) -> int:
        """Bytes of weights that a pass of the first exit reads; see ``EarlyExitSource``."""
        return exit_pass_bytes(self._pair, with_layers=self._front is not None)

    def open(self, request: RequestState) -> None:
        """Starts a request; the executor has the caches."""
        for book in self._books:
            book.open(request.id)
        self._said[request.id] = {}
        self._chances[request.id] = ExitChances(len(self.layers))

    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        """Candidates of the exit chosen for each node; count 0 while that has not arrived."""
        left, rows = nodes, np.arange(len(nodes))
        parts: list[Candidates] = []
        placed: list[IntArray] = []
        for at, book in enumerate(self._books):
            if self._front is None:
                answer = book.recall(left, k)
            else:
                answer = read_front(self._front, state, left, k, at=at, sample=self.gives_probs)
                self._note(at, left, answer)
            goes_on = self._goes_on(state, left, at)
            taken = (answer.counts > 0) & ~goes_on
            if taken.any():
                parts.append(picked(answer, np.flatnonzero(taken)))
                placed.append(rows[taken])
            left, rows = left.where(goes_on), rows[goes_on]
            if not len(left):
                break
        if not parts:
            return Candidates.empty(len(nodes))
        order, mask = np.concatenate(placed), np.zeros(len(nodes), np.bool_)
        mask[order] = True
        return picked(Candidates.joined(parts), np.argsort(order)).spread(mask)

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        """Takes what has arrived, learns from what was decided, forgets what left the trees."""
        for exits in output.exits:
            at, nodes = self.layers.index(exits.layer), Nodes(((exits.request, exits.node_ids),))
            self._books[at].keep(nodes, exits.candidates)
            self._note(at, nodes, exits.candidates)
            self.counters.rows += len(exits.node_ids)
        self.counters.passes += len({exits.layer for exits in output.exits})
        for book in self._books:
            book.commit(commits)
        for commit in commits:
            if commit.kind is not CommitKind.NONE:
                self._learn(commit)

    def close(self, request_id: int) -> None:
        """Forgets a request."""
        for book in self._books:
            book.close(request_id)
        self._said.pop(request_id, None)
        self._chances.pop(request_id, None)

    def _note(self, at: int, nodes: Nodes, answer: Candidates) -> None:
        """Keeps each node's best token at an exit, and the exit's confidence in it."""
        row = 0
        for request_id, ids in nodes.items:
            said = self._said.get(request_id)
            for node_id in ids.tolist():
                if said is not None and answer.counts[row]:
                    if answer.probs is None:
                        best = int(answer.tokens[row, 0])
                        sure = float(np.exp(answer.logprobs[row, 0]))
                    else:
                        probs = on_host(answer.probs[row])
                        best, sure = int(probs.argmax()), float(probs.max())
                    said.setdefault(node_id, {})[at] = best, min(1.0, sure)
                row += 1

    def _goes_on(self, state: DecodeState, nodes: Nodes, at: int) -> BoolArray:
        """bool[W]: nodes known at exit ``at`` for which a later one is expected to save more."""
        found = []
        for request_id, ids in nodes.items:
            said, chances = self._said[request_id], self._chances[request_id]
            tree = state.requests[request_id].tree
            reaches = np.exp(tree.scores[tree.slots(ids)]).tolist()
            for node_id, reach in zip(ids.tolist(), reaches, strict=True):
                known = said.get(node_id, {}).get(at)
                if known is None:
                    found.append(False)
                    continue
                here, *later = [
                    self._saving(chances.expected(at, other, known[1]), other, reach)
                    for other in range(at, len(self.layers))
                ]
                found.append(max(later, default=here) > here)
        return np.array(found, np.bool_)

    def _saving(self, alpha: float, at: int, reach: float) -> float:
        """Layers' time that a token of exit ``at`` is expected to save."""
        if self._front is None:
            return ppsd_saving(alpha, self.layers[at], self._num_layers)
        return eesd_saving(alpha, reach, self.layers[at], self._num_layers)

    def _learn(self, commit: Commit) -> None:
        said, chances = self._said[commit.request], self._chances[commit.request]
        decided = [*commit.retired_tokens[1:].tolist(), commit.next_token]
        for node_id, token in zip(commit.retired_ids.tolist(), decided, strict=True):
            known = said.pop(node_id, None)
            if known is not None and not self.gives_probs:
                chances.learn(known, token)
        kept = set(commit.kept_ids.tolist())
        self._said[commit.request] = {i: known for i, known in said.items() if i in kept}


def _exit_layers(pair: SourcePair, further: Sequence[int] | None) -> tuple[int, ...]:
    """Number of layers before each exit, the pair's own first.

    Raises:
        UserError: they do not rise, or are not inside the target.
    """
    first, last = pair.exit_layer, pair.num_layers - 1
    others = [min(2 * first, last)] if further is None else list(further)
    layers = [first, *others]
    if not others or layers != sorted(set(layers)) or layers[-1] > last:
        raise UserError(
            f"source.further_exits={further} must rise from above model.exit_layer={first} to"
            f" at most {last}, the target's layers less one; for one exit use source=early_exit"
        )
    return tuple(layers)


_BINS = 4
_PRIOR_WEIGHT = 4.0  # tokens that the belief before any observation counts for
_PRIOR_LEFT = 0.8  # share of an exit's errors that the next one is believed to make, too


class ExitChances:
    """Expected acceptance of each exit's best token, given how sure an exit before it was.

    Before any observation an exit is believed to be right as often as it says, and each further
    one to leave four fifths of the errors; both are assumptions that a few tokens outweigh. What is
    seen is counted by the confidence (in ``_BINS`` equal bins) of the exit that was asked.
    """

    def __init__(self, num_exits: int) -> None:
        """Nothing seen yet."""
        self._right = np.zeros((num_exits, num_exits, _BINS))
        self._seen = np.zeros((num_exits, num_exits, _BINS))

    def expected(self, asked: int, other: int, confidence: float) -> float:
        """Expected acceptance of exit ``other``, given ``asked``'s confidence in its own token.

        Args:
            asked: number of an exit whose token is known, from 0.
            other: the same exit, or a later one.
            confidence: probability of ``asked``'s best token, by its own distribution.
        """
        at = asked, other, _bin(confidence)
        believed = 1.0 - (1.0 - confidence) * _PRIOR_LEFT ** (other - asked)
        total = _PRIOR_WEIGHT + self._seen[at]
        return float((_PRIOR_WEIGHT * believed + self._right[at]) / total)

    def learn(self, said: Mapping[int, tuple[int, float]], token: int) -> None:
        """Counts a decided position.

        Args:
            said: exit number -> its best token and the confidence in it, of exits that were read.
            token: that the target decided on.
        """
        for asked, (_, confidence) in said.items():
            for other, (best, _) in said.items():
                if other >= asked:
                    at = asked, other, _bin(confidence)
                    self._seen[at] += 1
                    self._right[at] += best == token


def _bin(confidence: float) -> int:
    return min(_BINS - 1, int(confidence * _BINS))
