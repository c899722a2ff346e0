"""A target and a draft without models (``model=synthetic``).

Every request has a hidden target sequence, a keyed hash of (request, position). At each position
the true next token has a *rank* among the draft's candidates. A keyed draw assigns each position to
one of a few difficulty classes, and each class has its own distribution of ranks. The draft's
candidate probabilities are that distribution, so the draft is confident where it is right; pruning
by cumulative probability depends on such differences between positions. All draws are keyed, so
results are the same for every strategy.

A recorded run is a special case with one class per recorded position (``pairs/replay.py``).
``SyntheticSource`` uses only the protocol ``HiddenPair`` and serves both.

Shape letters: W nodes, K candidates, C classes, V vocabulary, n positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Protocol, cast

import numpy as np
from pydantic import Field

from specdec.clocks import CONTROLLER, Work
from specdec.errors import UserError
from specdec.metrics.counters import SourceCounters
from specdec.parts.fields import Index, Share, validated
from specdec.sources.hashing import hash_u64, hash_uniform
from specdec.types import NO_NODE, Candidates, Commit, FloatArray, IntArray, Needs, Nodes, Output

if TYPE_CHECKING:
    from specdec.sources.pair import SourcePair
    from specdec.state import DecodeState, RequestState

_MAX_RANK = 64  # larger ranks are misses
VocabSize = Annotated[int, Field(ge=4 * _MAX_RANK)]
Shares = Annotated[Sequence[Share], Field(min_length=1)]
Decays = Annotated[Sequence[Annotated[float, Field(gt=0, le=100)]], Field(min_length=1)]
_TABLE = 512  # positions tabulated at a time
_TOKEN, _CLASS, _RANK, _NODE, _NODE_CLASS = range(5)  # streams of the hash


class HiddenPair(Protocol):
    """Hidden sequences and the draft's ranks of their tokens."""

    vocab_size: int
    class_logprobs: FloatArray
    """float64[C, K]: candidates' log probabilities by class, decreasing; -inf for no candidate."""

    def tokens(self, request_id: int, positions: IntArray) -> IntArray:
        """int64[n]: the hidden sequence of a request at absolute positions."""
        ...

    def classes(self, request_id: int, positions: IntArray) -> IntArray:
        """int64[n]: class of the token after each position."""
        ...

    def ranks(self, request_id: int, positions: IntArray) -> IntArray:
        """int64[n]: number of candidates before the true token; K or more for a miss."""
        ...

    def reach(self, request_id: int, positions: IntArray) -> IntArray | None:
        """int64[n]: true tokens at the start of a chain below a root there; None: use ``ranks``.

        Replaces ``ranks`` for drafts that read the target's hidden states, whose accuracy depends
        on the distance to the root.
        """
        ...

    def node_keys(
        self, request_id: int, positions: IntArray, tokens: IntArray
    ) -> tuple[IntArray, IntArray]:
        """(first candidate, class), int64[n] each, of the draft's proposals after wrong nodes."""
        ...


class SyntheticPair:
    """The rank distributions of a synthetic target and draft.

    With class weights w_c, the probability that the true token has rank r = 1, 2, .. is

        P(r) = sum_c w_c P_c(r),   P_c(1) = top1_c,
        P_c(r) = (1 - top1_c) (1 - miss_c) r^-decay_c / Z_c   for 2 <= r <= 64,

    and that it is not among 64 candidates, (1 - top1_c) miss_c. The defaults give 0.65 at rank 1,
    0.88 within 4, 0.97 within 16 and 0.99 within 32, which SpecPipe 3.3.1 reports for a 1B draft.

    Attributes:
        vocab_size: V.
        class_probs: float64[C, 64], P_c(r).
        class_logprobs: float64[C, 64], its logarithm.
    """

    @validated
    def __init__(
        self,
        *,
        vocab_size: VocabSize = 32000,
        weights: Shares = (0.4, 0.3, 0.3),
        top1: Shares = (0.95, 0.6, 0.3),
        decay: Decays = (2.5, 2.2, 1.8),
        miss: Shares = (0.0, 0.0, 0.0),
        seed: Index = 0,
    ) -> None:
        """Sets the distributions; each sequence has one entry per difficulty class.

        Args:
            vocab_size: V, at least 256.
            weights: relative frequency of the class; normalised.
            top1: probability that the true token is the draft's first candidate.
            decay: exponent of the decrease over ranks 2 to 64.
            miss: probability that the true token is not among the 64 candidates, given that it is
                not the first.
            seed: key of sequences, classes and ranks.

        Raises:
            ValueError: for sequences of different lengths or values that are not probabilities.
        """
        lists = {"weights": weights, "top1": top1, "decay": decay, "miss": miss}
        if len({len(values) for values in lists.values()}) != 1:
            raise ValueError(f"weights, top1, decay and miss must have equal lengths: {lists}")
        if sum(weights) <= 0.0:
            raise ValueError(f"weights={list(weights)} must not all be 0")
        self.vocab_size = vocab_size
        self.seed = seed
        self._weights = np.asarray(weights, float) / sum(weights)
        self.class_probs = _rank_law(np.asarray(top1), np.asarray(decay), np.asarray(miss))
        if (np.diff(self.class_probs, axis=1) > 0.0).any():
            raise ValueError(
                f"top1={list(top1)} with decay={list(decay)} makes a later candidate more probable"
                " than an earlier one; raise top1 or lower decay (at least 0)"
            )
        with np.errstate(divide="ignore"):
            self.class_logprobs = np.log(self.class_probs)
        self._class_edges = np.cumsum(self._weights)[:-1]
        self._rank_edges = np.cumsum(self.class_probs, axis=1)

    def rank_probabilities(self) -> FloatArray:
        """float64[64]: probability that the true token has rank 1 .. 64, over all classes."""
        return self._weights @ self.class_probs

    def tokens(self, request_id: int, positions: IntArray) -> IntArray:
        """See ``HiddenPair``."""
        drawn = hash_u64(self.seed, _TOKEN, request_id, positions)
        return (drawn % np.uint64(self.vocab_size)).astype(np.int64)

    def classes(self, request_id: int, positions: IntArray) -> IntArray:
        """See ``HiddenPair``."""
        drawn = hash_uniform(self.seed, _CLASS, request_id, positions)
        return np.searchsorted(self._class_edges, drawn, side="right")

    def ranks(self, request_id: int, positions: IntArray) -> IntArray:
        """See ``HiddenPair``; 64 for a miss."""
        drawn = hash_uniform(self.seed, _RANK, request_id, positions)
        edges = self._rank_edges[self.classes(request_id, positions)]
        return (edges <= drawn[:, None]).sum(axis=1)

    def reach(self, request_id: int, positions: IntArray) -> IntArray | None:
        """None: the ranks do not depend on the root."""
        return None

    def node_keys(
        self, request_id: int, positions: IntArray, tokens: IntArray
    ) -> tuple[IntArray, IntArray]:
        """See ``HiddenPair``."""
        first = hash_u64(self.seed, _NODE, request_id, positions, tokens)
        drawn = hash_uniform(self.seed, _NODE_CLASS, request_id, positions, tokens)
        classes = np.searchsorted(self._class_edges, drawn, side="right")
        return (first % np.uint64(self.vocab_size)).astype(np.int64), classes


class _RequestTables:
    """One request's sequence, classes and ranks by position, and its nodes on the target's path.

    Attributes:
        on_path: ids of nodes known to be on the target's path.
        cached_len: committed tokens that a draft's cache would have.
        expanded: ids of nodes that a draft's cache would have.
    """

    def __init__(self, pair: HiddenPair, request: RequestState) -> None:
        self.request = request
        self.on_path = {request.tree.root_id}
        self.cached_len = 0
        self.expanded: set[int] = set()
        self._pair = pair
        self._extend(request.num_prompt + request.stop.max_new_tokens + _TABLE)

    def _extend(self, size: int) -> None:
        positions = np.arange(size)
        self.tokens = self._pair.tokens(self.request.id, positions)
        self.classes = self._pair.classes(self.request.id, positions)
        self._ranks = self._pair.ranks(self.request.id, positions)
        self._reach = self._pair.reach(self.request.id, positions)

    def rank(self, position: int) -> int:
        """Number of candidates before the true token at the true node at ``position``."""
        if self._reach is None:
            return int(self._ranks[position])
        root = self.request.prefix_len
        return 0 if position - root < self._reach[root] else _MAX_RANK

    def reserve(self, last: int) -> None:
        """Extends the tables beyond position ``last``."""
        if last + 1 >= len(self.tokens):
            self._extend(last + _TABLE)

    def true_nodes(self, slots: IntArray, positions: IntArray) -> list[int]:
        """Indices into ``slots`` of the nodes that are on the target's path."""
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
    """The synthetic draft; counts and charges passes and rows as a draft model would."""

    needs = Needs()
    gives_probs = False

    def __init__(self, *, pair: HiddenPair | SourcePair, prefill_chunk: int = 512) -> None:
        """Proposes tokens for the target of ``pair``.

        Args:
            pair: the hidden sequences and the draft's rank distributions, or a model pair that has
                them as attribute ``hidden``.
            prefill_chunk: maximum number of prompt rows per pass. Default: 512.

        Raises:
            UserError: for a pair of real models.
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
        self._tables: dict[int, _RequestTables] = {}
        self._logprobs = hidden.class_logprobs
        self._counts = (self._logprobs > -np.inf).sum(axis=1)
        self._offsets = np.arange(self._logprobs.shape[1])

    def open(self, request: RequestState) -> None:
        """Tabulates the request's hidden sequence."""
        self._tables[request.id] = _RequestTables(self._pair, request)

    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        """Up to min(k, K) candidates of each node (K is 64, or as recorded).

        On the target's path the true token has its rank; elsewhere all candidates are wrong.
        """
        state.clock.start(CONTROLLER)  # no model call marks the start of the work
        k = min(k, len(self._offsets))
        parts = []
        catch_up = 0
        for request_id, ids in nodes.items:
            tables = self._tables[request_id]
            slots = tables.request.tree.slots(ids)
            assert NO_NODE not in slots, f"nodes {ids} of request {request_id} are not in the tree"
            parts.append(self._propose(tables, slots, k))
            tables.expanded.update(ids.tolist())
            catch_up += tables.request.prefix_len - tables.cached_len
            tables.cached_len = tables.request.prefix_len
        self._count(state, catch_up, len(nodes))
        tokens = np.concatenate([tokens for tokens, _ in parts])
        classes = np.concatenate([classes for _, classes in parts])
        logprobs = self._logprobs[classes, :k]
        counts = np.minimum(self._counts[classes], k)
        return Candidates(tokens=tokens, logprobs=logprobs, counts=counts)

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        """Updates which committed tokens and nodes a draft's cache would have."""
        for commit in commits:
            tables = self._tables.get(commit.request)
            if tables is None:
                continue
            position = commit.prefix_len - len(commit.retired_ids)
            for node_id in commit.retired_ids.tolist():
                if tables.cached_len == position and node_id in tables.expanded:
                    tables.cached_len += 1
                position += 1
            kept = set(commit.kept_ids.tolist())
            tables.expanded &= kept
            tables.on_path &= kept

    def close(self, request_id: int) -> None:
        """Drops the request's tables."""
        self._tables.pop(request_id, None)

    def _propose(
        self, tables: _RequestTables, slots: IntArray, k: int
    ) -> tuple[IntArray, IntArray]:
        """(tokens int64[W, k], classes int64[W])."""
        tree = tables.request.tree
        positions = tree.positions[slots]
        tables.reserve(int(positions.max()))
        first, classes = self._pair.node_keys(tables.request.id, positions, tree.tokens[slots])
        true_rows = tables.true_nodes(slots, positions)
        for row in true_rows:
            position = int(positions[row])
            classes[row] = tables.classes[position]
            first[row] = tables.tokens[position + 1] + 1  # wrong candidates: the tokens after it
        tokens = (first[:, None] + self._offsets[:k]) % self._pair.vocab_size
        for row in true_rows:
            rank = tables.rank(int(positions[row]))
            if rank < k:
                tokens[row, rank] = tables.tokens[positions[row] + 1]
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
