"""A target and a draft without models (``model=synthetic``).

Every request has a hidden target sequence, a keyed hash of (request, position). At each position
the draft knows the true next token up to a *rank*: the place of the true token among its
candidates. Positions differ: a keyed draw puts each in one of a few difficulty classes, and every
class has its own law of ranks. The draft's candidate probabilities are that law, so it is sure
where it is right (one curve for all positions would not do: pruning by cumulative probability
lives on the difference). Everything is keyed, so results are the same for every strategy.

A recorded run is the same thing with one class per recorded position (``pairs/replay.py``), so the
source below serves both: it knows a ``HiddenPair`` only.

Shape letters: W nodes, K candidates, C classes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np

from specdec.clocks import CONTROLLER, Work
from specdec.errors import UserError
from specdec.metrics.counters import SourceCounters
from specdec.sources.contexts import hash_u64, hash_uniform
from specdec.types import (
    NO_NODE,
    Candidates,
    Commit,
    CommitKind,
    FloatArray,
    IntArray,
    Needs,
    Nodes,
    Output,
)

if TYPE_CHECKING:
    from specdec.sources.pair import SourcePair
    from specdec.state import DecodeState, RequestState

_MAX_RANK = 64  # ranks beyond are misses
_TABLE = 512  # positions computed at a time
_TOKEN, _CLASS, _RANK, _NODE, _NODE_CLASS = range(5)  # streams of the hash


class HiddenPair(Protocol):
    """What the source and the target below need to know of a hidden sequence and its draft."""

    vocab_size: int
    class_logprobs: FloatArray
    """float64[C, K]: candidates' log probabilities by class, falling; -inf where there is none."""

    def tokens(self, request_id: int, positions: IntArray) -> IntArray:
        """int64[n]: the hidden sequence of a request at absolute positions."""
        ...

    def classes(self, request_id: int, positions: IntArray) -> IntArray:
        """int64[n]: class of the token after each position."""
        ...

    def ranks(self, request_id: int, positions: IntArray) -> IntArray:
        """int64[n]: how many candidates stand before the right one; K or more for a miss."""
        ...

    def reach(self, request_id: int, positions: IntArray) -> IntArray | None:
        """int64[n]: right tokens of a chain that starts at a root there; None: ranks say it all.

        Where given, it stands in for ``ranks``, which then depend on the root (drafts that read
        the target's hidden states guess better near it).
        """
        ...

    def node_keys(
        self, request_id: int, positions: IntArray, tokens: IntArray
    ) -> tuple[IntArray, IntArray]:
        """(first token, class) int64[n] each of what the draft proposes after wrong nodes."""
        ...


class SyntheticPair:
    """The laws of a synthetic target and draft; makes both.

    With class weights w_c, the probability that the true token has rank r = 1, 2, .. is

        P(r) = sum_c w_c P_c(r),   P_c(1) = top1_c,
        P_c(r) = (1 - top1_c) (1 - miss_c) r^-decay_c / Z_c   for 2 <= r <= 64,

    and (1 - top1_c) miss_c that it is not among 64 candidates. The defaults give 0.65 at rank 1,
    0.88 within 4, 0.97 within 16 and 0.99 within 32, which SpecPipe 3.3.1 states of a 1B draft.

    Attributes:
        vocab_size: V.
        class_probs, class_logprobs: float64[C, 64], P_c(r) and its logarithm.
        target: the target, answered by position.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 32000,
        weights: Sequence[float] = (0.4, 0.3, 0.3),
        top1: Sequence[float] = (0.95, 0.6, 0.3),
        decay: Sequence[float] = (2.5, 2.2, 1.8),
        miss: Sequence[float] = (0.0, 0.0, 0.0),
        seed: int = 0,
    ) -> None:
        """Sets the laws, one entry of each list per difficulty class.

        Args:
            vocab_size: V, at least 256.
            weights: share of the positions; normalised.
            top1: chance that the true token is the draft's first.
            decay: how fast the chance falls with the rank, below the first.
            miss: share of the rest that is not among the first 64.
            seed: of sequences, classes and ranks.

        Raises:
            ValueError: for lists of different lengths or values that are no probabilities.
        """
        if vocab_size < 4 * _MAX_RANK:
            raise ValueError(f"vocab_size={vocab_size} must be at least {4 * _MAX_RANK}")
        lists = {"weights": weights, "top1": top1, "decay": decay, "miss": miss}
        if len({len(values) for values in lists.values()}) != 1 or not len(weights):
            raise ValueError(f"weights, top1, decay and miss need one value per class, got {lists}")
        for key in ("weights", "top1", "miss"):
            if not all(0.0 <= value <= 1.0 for value in lists[key]):
                raise ValueError(f"{key}={list(lists[key])} must lie between 0 and 1")
        if sum(weights) <= 0.0:
            raise ValueError(f"weights={list(weights)} must not all be 0")
        self.vocab_size = vocab_size
        self.seed = seed
        self._weights = np.asarray(weights, float) / sum(weights)
        self.class_probs = _rank_law(np.asarray(top1), np.asarray(decay), np.asarray(miss))
        if (np.diff(self.class_probs, axis=1) > 0.0).any():
            raise ValueError(
                f"top1={list(top1)} with decay={list(decay)} would make a lower candidate more"
                " probable than a higher one; raise top1 or lower decay (which is at least 0)"
            )
        with np.errstate(divide="ignore"):
            self.class_logprobs = np.log(self.class_probs)
        self._class_edges = np.cumsum(self._weights)[:-1]
        self._rank_edges = np.cumsum(self.class_probs, axis=1)
        self.target = SyntheticTarget(self)

    def rank_probabilities(self) -> FloatArray:
        """float64[64]: the chance that the true token has rank 1 .. 64, over all classes."""
        return self._weights @ self.class_probs

    def tokens(self, request_id: int, positions: IntArray) -> IntArray:
        """int64[n]: the hidden sequence of a request at absolute positions."""
        drawn = hash_u64(self.seed, _TOKEN, request_id, positions)
        return (drawn % np.uint64(self.vocab_size)).astype(np.int64)

    def classes(self, request_id: int, positions: IntArray) -> IntArray:
        """int64[n]: difficulty class of the token after each position."""
        drawn = hash_uniform(self.seed, _CLASS, request_id, positions)
        return np.searchsorted(self._class_edges, drawn, side="right")

    def ranks(self, request_id: int, positions: IntArray) -> IntArray:
        """int64[n]: rank - 1 of the token after each position; 64 for a miss."""
        drawn = hash_uniform(self.seed, _RANK, request_id, positions)
        edges = self._rank_edges[self.classes(request_id, positions)]
        return (edges <= drawn[:, None]).sum(axis=1)

    def reach(self, request_id: int, positions: IntArray) -> IntArray | None:
        """None: ranks do not depend on the root."""
        return None

    def node_keys(
        self, request_id: int, positions: IntArray, tokens: IntArray
    ) -> tuple[IntArray, IntArray]:
        """(first token, class) int64[n] each of what the draft proposes after wrong nodes."""
        first = hash_u64(self.seed, _NODE, request_id, positions, tokens)
        drawn = hash_uniform(self.seed, _NODE_CLASS, request_id, positions, tokens)
        classes = np.searchsorted(self._class_edges, drawn, side="right")
        return (first % np.uint64(self.vocab_size)).astype(np.int64), classes


class SyntheticTarget:
    """Answers with the hidden sequence."""

    def __init__(self, pair: HiddenPair) -> None:
        self._pair = pair

    def answer(self, request_id: int, positions: IntArray) -> IntArray:
        """The target's token after each position.

        A node off the target's path gets the same answer as the one on it. That is never consumed:
        a verifier follows matching children from the root, so it reads answers of the path only.

        Args:
            request_id: keys the sequence.
            positions: int64[A], absolute positions of nodes.

        Returns:
            int64[A].
        """
        return self._pair.tokens(request_id, positions + 1)


class _Book:
    """One request: tables over positions, and which nodes are on the target's path."""

    def __init__(self, pair: HiddenPair, request: RequestState) -> None:
        self.request = request
        self.on_path = {request.tree.root_id}
        self.cached_len = 0
        self.asked: set[int] = set()
        self._pair = pair
        self._extend(request.num_prompt + request.stop.max_new_tokens + _TABLE)

    def _extend(self, size: int) -> None:
        positions = np.arange(size)
        self.tokens = self._pair.tokens(self.request.id, positions)
        self.classes = self._pair.classes(self.request.id, positions)
        self._ranks = self._pair.ranks(self.request.id, positions)
        self._reach = self._pair.reach(self.request.id, positions)

    def rank(self, position: int) -> int:
        """Where the right token stands among the candidates of the true node at ``position``."""
        if self._reach is None:
            return int(self._ranks[position])
        root = self.request.prefix_len
        return 0 if position - root < self._reach[root] else _MAX_RANK

    def reserve(self, last: int) -> None:
        """Makes the tables reach beyond position ``last``."""
        if last + 1 >= len(self.tokens):
            self._extend(last + _TABLE)

    def true_nodes(self, slots: IntArray, positions: IntArray) -> list[int]:
        """Rows of the nodes that are on the target's path."""
        tree = self.request.tree
        hits = np.flatnonzero((tree.tokens[slots] == self.tokens[positions]) | (slots == 0))
        return [row for row in hits.tolist() if self._is_on_path(int(slots[row]))]

    def _is_on_path(self, slot: int) -> bool:
        tree = self.request.tree
        node_id = int(tree.ids[slot])
        if slot == 0 or node_id in self.on_path:
            return True
        if tree.tokens[slot] != self.tokens[tree.positions[slot]]:
            return False
        if not self._is_on_path(int(tree.parents[slot])):
            return False
        self.on_path.add(node_id)
        return True


class SyntheticSource:
    """The synthetic draft. Counts and charges passes and rows as a draft model would."""

    needs = Needs()
    gives_probs = False

    def __init__(self, *, pair: HiddenPair | SourcePair, prefill_chunk: int = 512) -> None:
        """Proposes for the target of ``pair``.

        Args:
            pair: the hidden sequences and the draft's laws, or a model pair that has them as
                attribute ``hidden``.
            prefill_chunk: rows per pass while it catches up with a prompt.

        Raises:
            UserError: a pair of real models.
        """
        hidden = getattr(pair, "hidden", pair)
        if not hasattr(hidden, "class_logprobs"):
            raise UserError(
                "source=synthetic proposes for model=synthetic only; choose source=draft_model"
            )
        self.vocab_size: int | None = pair.vocab_size
        self.counters = SourceCounters(by_level={"draft": 0})
        self._pair = cast("HiddenPair", hidden)
        self._prefill_chunk = prefill_chunk
        self._books: dict[int, _Book] = {}
        self._logprobs = hidden.class_logprobs
        self._counts = (self._logprobs > -np.inf).sum(axis=1)
        self._offsets = np.arange(self._logprobs.shape[1])

    def open(self, request: RequestState) -> None:
        """Tabulates the request's hidden sequence."""
        self._books[request.id] = _Book(self._pair, request)

    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        """Up to K candidates of each node (64; of a record as many as it has).

        On the target's path the true token stands at its rank; elsewhere all are wrong.
        """
        state.clock.start(CONTROLLER)  # no model call would tell when the work began
        k = min(k, len(self._offsets))
        parts = []
        catch_up = 0
        for request_id, ids in nodes.items:
            book = self._books[request_id]
            tree = book.request.tree
            slots = tree.slots(ids)
            assert NO_NODE not in slots, f"nodes {ids} of request {request_id} left the tree"
            parts.append(self._propose(book, slots, k))
            book.asked.update(ids.tolist())
            catch_up += book.request.prefix_len - book.cached_len
            book.cached_len = book.request.prefix_len
        self._count(state, catch_up, len(nodes))
        tokens = np.concatenate([tokens for tokens, _ in parts])
        classes = np.concatenate([classes for _, classes in parts])
        logprobs = self._logprobs[classes, :k]
        counts = np.minimum(self._counts[classes], k)
        return Candidates(tokens=tokens, logprobs=logprobs, counts=counts)

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        """Notes which committed tokens a draft's cache would hold."""
        for commit in commits:
            book = self._books.get(commit.request)
            if book is None or commit.kind is CommitKind.NONE:
                continue
            position = commit.prefix_len - len(commit.retired_ids)
            for node_id in commit.retired_ids.tolist():
                if book.cached_len == position and node_id in book.asked:
                    book.cached_len += 1
                position += 1
            kept = set(commit.kept_ids.tolist())
            book.asked &= kept
            book.on_path &= kept

    def close(self, request_id: int) -> None:
        """Forgets the request."""
        self._books.pop(request_id, None)

    def _propose(self, book: _Book, slots: IntArray, k: int) -> tuple[IntArray, IntArray]:
        """(tokens int64[W, k], classes int64[W])."""
        tree = book.request.tree
        positions = tree.positions[slots]
        book.reserve(int(positions.max()))
        first, classes = self._pair.node_keys(book.request.id, positions, tree.tokens[slots])
        true_rows = book.true_nodes(slots, positions)
        for row in true_rows:
            position = int(positions[row])
            classes[row] = book.classes[position]
            first[row] = book.tokens[position + 1] + 1  # the wrong ones: the V - 1 tokens after it
        tokens = (first[:, None] + self._offsets[:k]) % self._pair.vocab_size
        for row in true_rows:
            rank = book.rank(int(positions[row]))
            if rank < k:
                tokens[row, rank] = book.tokens[positions[row] + 1]
        return tokens, classes

    def _count(self, state: DecodeState, catch_up: int, num_nodes: int) -> None:
        counters = self.counters
        counters.catch_up_rows += catch_up
        while catch_up > self._prefill_chunk:
            self._pass(state, self._prefill_chunk)
            catch_up -= self._prefill_chunk
        self._pass(state, catch_up + num_nodes)

    def _pass(self, state: DecodeState, num_rows: int) -> None:
        self.counters.passes += 1
        self.counters.rows += num_rows
        self.counters.by_level["draft"] += 1
        state.clock.charge(CONTROLLER, Work.DRAFT, num_rows)


def _rank_law(top1: FloatArray, decay: FloatArray, miss: FloatArray) -> FloatArray:
    """float64[C, 64], see ``SyntheticPair``."""
    ranks = np.arange(2, _MAX_RANK + 1)
    tail = ranks ** -decay[:, None]
    tail *= ((1.0 - top1) * (1.0 - miss))[:, None] / tail.sum(axis=1, keepdims=True)
    return np.concatenate([top1[:, None], tail], axis=1)
