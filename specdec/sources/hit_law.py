"""Hidden target sequences of ``model=synthetic``, and the ranks that a draft gives their tokens.

Shape letters: G groups of prompts, C classes of positions, D depths, K candidates, V vocabulary, n
positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Protocol

import numpy as np
from pydantic import Field

from specdec.parts.fields import Index, Share, validated
from specdec.sources.hashing import as_uniform, hash_u64, hash_uniform
from specdec.types import FloatArray, IntArray

MAX_RANK = 64
"""Larger ranks are misses."""

VocabSize = Annotated[int, Field(ge=4 * MAX_RANK)]
Shares = Annotated[Sequence[Share], Field(min_length=1)]
Decays = Annotated[Sequence[Annotated[float, Field(ge=0, le=100)]], Field(min_length=1)]
Stays = Sequence[Annotated[float, Field(ge=0, lt=1)]]
Odds = Sequence[Annotated[float, Field(ge=-100, le=100)]]

_TOKEN, _CLASS, _RANK, _NODE, _NODE_CLASS, _GROUP, _STAY = range(7)  # streams of the hash
_NODE_STREAMS = np.array([[_NODE], [_NODE_CLASS]])


class HiddenPair(Protocol):
    """Hidden target sequences and the draft's ranks of their tokens."""

    vocab_size: int
    num_depths: int
    """Number of distances from the root with different ``ranks``; 1: the root does not matter."""
    class_logprobs: FloatArray
    """float64[C, K]: log probabilities of the candidates by class, decreasing; -inf for none."""

    def tokens(self, request_id: int, positions: IntArray) -> IntArray:
        """Returns int64[n]: the hidden sequence of a request at absolute positions."""
        ...

    def classes(self, request_id: int, positions: IntArray) -> IntArray:
        """Returns int64[n]: the class of the token after each position."""
        ...

    def ranks(self, request_id: int, positions: IntArray, depth: int = 0) -> IntArray:
        """Returns int64[n]: number of candidates before the true token; K or more for a miss."""
        ...

    def reach(self, request_id: int, positions: IntArray) -> IntArray | None:
        """Returns int64[n]: number of true tokens that begin a chain below a root at the position.

        If it is not None, it replaces ``ranks``; for drafts that read the target's hidden states.
        """
        ...

    def node_keys(
        self, request_id: int, positions: IntArray, tokens: IntArray
    ) -> tuple[IntArray, IntArray]:
        """Returns the first candidate and the class after nodes off the target's path, int64[n]."""
        ...


class SyntheticPair:
    """The rank distributions of a synthetic target and draft.

    A prompt belongs to a group and a position to a class. At the next position the class stays with
    probability stay_c, otherwise it is drawn from the weights w of the group. In class c the true
    token has rank r = 1, 2, .. at depth d (0 for the root's children) with probability

        P_c(1) = sigmoid(logit(top1_c) + depth_d),
        P_c(r) = (1 - P_c(1)) (1 - miss_c) r^-decay_c / Z_c   for 2 <= r <= 64,

    and is not among 64 candidates with probability (1 - P_c(1)) miss_c. The defaults give 0.65 at
    rank 1, 0.88 within 4, 0.97 within 16 and 0.99 within 32; SpecPipe 3.3.1 reports the last one
    for a 1B draft, the others are assumed. ``specdec fit`` measures these parameters
    (docs/calibration.md).

    Args:
        vocab_size: V, at least 256.
        weights: relative frequency with which each class is drawn.
        top1: per class, probability that the true token is the draft's first candidate.
        decay: per class, exponent of the decrease over ranks 2 to 64.
        miss: per class, probability that the true token is not among the 64 candidates, given that
            it is not the first.
        stay: per class, probability to keep it at the next position; empty: 0.
        depth: added to the log odds of ``top1`` by distance from the root; the last entry applies
            to all greater distances; empty: 0.
        group_shares: share of the prompts in each group; empty: one group.
        group_weights: the ``weights`` of each group, which replace ``weights``.
        seed: key of sequences, classes and ranks.

    Attributes:
        shares: float64[G, C], share of the positions of a prompt in each class.
        class_probs: float64[C, 64], P_c(r) at depth 0; ``class_logprobs`` is its logarithm.
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
        stay: Stays = (),
        depth: Odds = (),
        group_shares: Sequence[Share] = (),
        group_weights: Sequence[Shares] = (),
        seed: Index = 0,
    ) -> None:
        rows = _checked_rows(
            {"weights": weights, "top1": top1, "decay": decay, "miss": miss},
            {"stay": stay} if stay else {},
            group_shares,
            group_weights,
        )
        self.vocab_size, self.seed = vocab_size, seed
        self._weights = rows / rows.sum(axis=1, keepdims=True)  # [G, C]
        self._stay = np.asarray(stay or [0.0] * len(top1), float)
        self._group_shares = np.asarray(group_shares or [1.0], float) / sum(group_shares or [1.0])
        shares = self._weights / (1.0 - self._stay)
        self.shares: FloatArray = shares / shares.sum(axis=1, keepdims=True)
        odds = np.asarray(depth or [0.0], float)
        self.num_depths = len(odds)
        tail = np.asarray(decay, float), np.asarray(miss, float)
        by_depth = [_rank_law(_shifted(np.asarray(top1, float), o), *tail) for o in odds]
        self.class_probs: FloatArray = by_depth[0]
        if (np.diff(self.class_probs, axis=1) > 1e-12).any():
            raise ValueError(
                f"top1={list(top1)} with decay={list(decay)} makes a later candidate more probable"
                " than an earlier one; raise top1 or lower decay (at least 0)"
            )
        with np.errstate(divide="ignore"):
            self.class_logprobs: FloatArray = np.log(self.class_probs)
        self._rank_edges = np.cumsum(by_depth, axis=2)  # [D, C, 64]
        self._class_edges = self.shares.cumsum(axis=1)[:, :-1]  # [G, C - 1]
        self._groups: dict[int, int] = {}  # request id -> its group

    def rank_probabilities(self) -> FloatArray:
        """Returns float64[64]: probability of each rank at depth 0, averaged over all positions."""
        result: FloatArray = self._group_shares @ self.shares @ self.class_probs
        return result

    def tokens(self, request_id: int, positions: IntArray) -> IntArray:
        drawn = hash_u64(self.seed, _TOKEN, request_id, positions)
        return (drawn % np.uint64(self.vocab_size)).astype(np.int64)

    def classes(self, request_id: int, positions: IntArray) -> IntArray:
        group = self._group(request_id)
        if not self._stay.any():
            drawn = hash_uniform(self.seed, _CLASS, request_id, positions)
            return _drawn(self._weights[group], drawn)
        every = np.arange(int(positions.max(initial=0)) + 1)
        drawn = hash_uniform(self.seed, _CLASS, request_id, every)
        anew = _drawn(self._weights[group], drawn).tolist()
        stays = hash_uniform(self.seed, _STAY, request_id, every).tolist()
        keep = self._stay.tolist()
        current = int(_drawn(self.shares[group], drawn[:1])[0])
        classes = [current]
        for at in range(1, len(every)):
            current = current if stays[at] < keep[current] else anew[at]
            classes.append(current)
        return np.array(classes, np.int64)[positions]

    def ranks(self, request_id: int, positions: IntArray, depth: int = 0) -> IntArray:
        drawn = hash_uniform(self.seed, _RANK, request_id, positions)
        law = self._rank_edges[min(depth, self.num_depths - 1)]
        edges = law[self.classes(request_id, positions)]
        return (edges <= drawn[:, None]).sum(axis=1)

    def reach(self, request_id: int, positions: IntArray) -> IntArray | None:
        return None

    def node_keys(
        self, request_id: int, positions: IntArray, tokens: IntArray
    ) -> tuple[IntArray, IntArray]:
        level = int(positions[0])
        at = level if (positions == level).all() else positions
        first, drawn = hash_u64(self.seed, _NODE_STREAMS, request_id, at, tokens)
        edges = self._class_edges[self._group(request_id)]
        classes = edges.searchsorted(as_uniform(drawn), side="right")
        return (first % np.uint64(self.vocab_size)).astype(np.int64), classes

    def _group(self, request_id: int) -> int:
        group = self._groups.get(request_id)
        if group is None:
            drawn = hash_uniform(self.seed, _GROUP, np.array([request_id]))
            group = self._groups[request_id] = int(_drawn(self._group_shares, drawn)[0])
        return group


def _checked_rows(
    lists: dict[str, Sequence[float]],
    optional: dict[str, Sequence[float]],
    group_shares: Sequence[float],
    group_weights: Sequence[Sequence[float]],
) -> FloatArray:
    """Returns float64[G, C], the weights of each group; raises ``ValueError`` for bad values."""
    every = {**lists, **optional}
    every |= {f"group_weights[{g}]": row for g, row in enumerate(group_weights)}
    if len({len(values) for values in every.values()}) != 1:
        raise ValueError(f"{', '.join(every)} must have equal lengths: {every}")
    if len(group_shares) != len(group_weights):
        raise ValueError(
            f"group_shares={list(group_shares)} and {len(group_weights)} group_weights must be as"
            " many as each other"
        )
    weights = lists["weights"]
    rows: FloatArray = np.asarray(group_weights or [weights], float)
    if sum(group_shares or [1.0]) <= 0.0 or (rows.sum(axis=1) <= 0.0).any():
        raise ValueError(f"weights={list(weights)} and shares of groups must not all be 0")
    return rows


def _drawn(shares: FloatArray, uniform: FloatArray) -> IntArray:
    """Returns int64[n]: indices drawn with probabilities ``shares`` by uniform numbers."""
    return np.searchsorted(np.cumsum(shares)[:-1], uniform, side="right")


def _shifted(top1: FloatArray, odds: float) -> FloatArray:
    """Adds ``odds`` to the log odds of probabilities; exact for 0."""
    if odds == 0.0:
        return top1
    factor = np.exp(odds)
    shifted: FloatArray = top1 * factor / (1.0 - top1 + top1 * factor)
    return shifted


def _rank_law(top1: FloatArray, decay: FloatArray, miss: FloatArray) -> FloatArray:
    """Returns P_c(r) of ``SyntheticPair``, float64[C, 64]."""
    ranks = np.arange(2, MAX_RANK + 1)
    tail = ranks ** -decay[:, None]
    tail *= ((1.0 - top1) * (1.0 - miss))[:, None] / tail.sum(axis=1, keepdims=True)
    return np.concatenate([top1[:, None], tail], axis=1)
