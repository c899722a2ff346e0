"""A target and a draft without models (``model=synthetic``).

Every request has a given target sequence, a hash of seed, request and position. At each position
the true next token has a *rank* among the draft's candidates. The hash also assigns each position
to one of a few difficulty classes, each with its own distribution of ranks. The draft's candidate
probabilities are that distribution, so the draft is confident where it is right. A recorded run is
a special case with one class per recorded position (``pairs/recorded.py``).

Shape letters: W nodes, K candidates, G groups of prompts, C classes of positions, D depths, M kept
nodes, V vocabulary, n positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from specdec.clocks import CONTROLLER, Work
from specdec.executors.models import ModelPair
from specdec.interfaces import TokenSource
from specdec.metrics.counters import SourceCounters
from specdec.parts.fields import Count, Index, Share, validated
from specdec.sources.hashing import as_uniform, hash_u64, hash_uniform
from specdec.state import DecodeState, RequestState
from specdec.types import Candidates, Commit, FloatArray, IntArray, Nodes, Output

MAX_RANK = 64
"""Number of ranks; a true token of a larger rank is not among the candidates (a miss)."""

VocabSize = Annotated[int, Field(ge=4 * MAX_RANK)]
Shares = Annotated[Sequence[Share], Field(min_length=1)]
Decays = Annotated[Sequence[Annotated[float, Field(ge=0, le=100)]], Field(min_length=1)]
Stays = Sequence[Annotated[float, Field(ge=0, lt=1)]]
Odds = Sequence[Annotated[float, Field(ge=-100, le=100)]]

_TOKEN, _CLASS, _RANK, _NODE, _NODE_CLASS, _GROUP, _STAY = range(7)  # streams of the hash
_NODE_STREAMS = np.array([[_NODE], [_NODE_CLASS]])
_TABLE = 512  # positions tabulated at a time
_MAX_STALE = 4096  # number of node ids above which those of pruned nodes are dropped


class HiddenPair:
    """Base of target-draft pairs without models: target tokens and their ranks in the draft."""

    vocab_size: int
    num_depths: int = 1
    """Number of distances from the root with different ``ranks``; 1: distance has no effect."""
    class_logprobs: FloatArray
    """float64[C, K]: log probabilities of K candidates per class, decreasing; -inf for none."""

    def tokens(self, request_id: int, positions: IntArray) -> IntArray:
        """Returns int64[n]: the given target tokens of a request at absolute positions."""
        raise NotImplementedError

    def classes(self, request_id: int, positions: IntArray) -> IntArray:
        """Returns int64[n]: the difficulty class of the token after each position."""
        raise NotImplementedError

    def ranks(self, request_id: int, positions: IntArray, depth: int = 0) -> IntArray:
        """Returns int64[n]: number of candidates before the true next token; K or more: a miss."""
        raise NotImplementedError

    def reach(self, request_id: int, positions: IntArray) -> IntArray | None:
        """Returns int64[n]: with the root at each position, how many first draft tokens are true.

        Replaces ``ranks`` if it is not None; for drafts that read the target's hidden states.
        """
        return None

    def node_keys(
        self, request_id: int, positions: IntArray, tokens: IntArray
    ) -> tuple[IntArray, IntArray]:
        """Returns first candidate and class, int64[n] each, of nodes not on the target's path."""
        raise NotImplementedError


@validated
@dataclass(eq=False, kw_only=True)
class SyntheticPair(HiddenPair):
    """A synthetic target and draft, given by distributions of ranks.

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
        stay: per class, probability that the next position has the same class; empty: 0.
        depth: numbers added to the log odds of ``top1``, one per distance from the root; the last
            applies to all greater distances; empty: 0.
        group_shares: share of the prompts in each group; empty: one group.
        group_weights: the ``weights`` of each group, which replace ``weights``.
        seed: seed of sequences, classes and ranks.

    Attributes:
        shares: float64[G, C], expected share of a prompt's positions in each class, by group.
        class_probs: float64[C, 64], P_c(r) at depth 0; ``class_logprobs`` is its logarithm.
    """

    vocab_size: VocabSize = 32000
    weights: Shares = (0.4, 0.3, 0.3)
    top1: Shares = (0.95, 0.6, 0.3)
    decay: Decays = (2.5, 2.2, 1.8)
    miss: Shares = (0.0, 0.0, 0.0)
    stay: Stays = ()
    depth: Odds = ()
    group_shares: Sequence[Share] = ()
    group_weights: Sequence[Shares] = ()
    seed: Index = 0

    def __post_init__(self) -> None:
        rows = np.asarray(self._checked_weights(), float)
        self._weights: FloatArray = rows / rows.sum(axis=1, keepdims=True)  # [G, C]
        self._stay = np.asarray(self.stay or [0.0] * len(self.top1), float)
        self._group_shares = np.asarray(self.group_shares or [1.0], float)
        self._group_shares /= self._group_shares.sum()
        shares = self._weights / (1.0 - self._stay)
        self.shares: FloatArray = shares / shares.sum(axis=1, keepdims=True)
        self.num_depths = len(self.depth or [0.0])
        by_depth = [self._rank_law(odds) for odds in self.depth or [0.0]]
        self.class_probs: FloatArray = by_depth[0]
        if (np.diff(self.class_probs, axis=1) > 1e-12).any():
            raise ValueError(
                f"top1={list(self.top1)} with decay={list(self.decay)} makes a later candidate more"
                " probable than an earlier one; raise top1 or lower decay (at least 0)"
            )
        with np.errstate(divide="ignore"):
            self.class_logprobs: FloatArray = np.log(self.class_probs)
        self._rank_edges = np.cumsum(by_depth, axis=2)  # [D, C, 64]
        self._class_edges = self.shares.cumsum(axis=1)[:, :-1]  # [G, C - 1]

    def _checked_weights(self) -> Sequence[Sequence[float]]:
        """Returns the weights of each group; ``ValueError`` if arguments do not fit each other."""
        lists = {name: getattr(self, name) for name in ("weights", "top1", "decay", "miss")}
        lists |= {"stay": self.stay} if self.stay else {}
        lists |= {f"group_weights[{g}]": row for g, row in enumerate(self.group_weights)}
        if len({len(values) for values in lists.values()}) != 1:
            raise ValueError(f"{', '.join(lists)} must have equal lengths: {lists}")
        if len(self.group_shares) != len(self.group_weights):
            raise ValueError(
                f"group_shares={list(self.group_shares)} and {len(self.group_weights)}"
                " group_weights must be as many as each other"
            )
        rows = self.group_weights or [self.weights]
        if sum(self.group_shares or [1.0]) <= 0.0 or min(map(sum, rows)) <= 0.0:
            raise ValueError(f"weights={list(self.weights)} and shares of groups must not all be 0")
        return rows

    def _rank_law(self, odds: float) -> FloatArray:
        """Returns float64[C, 64]: each rank's probability; ``odds`` shift rank 1's log odds."""
        top1, decay, miss = (np.asarray(v, float) for v in (self.top1, self.decay, self.miss))
        if odds:
            factor = np.exp(odds)
            top1 = top1 * factor / (1.0 - top1 + top1 * factor)
        tail = np.arange(2, MAX_RANK + 1) ** -decay[:, None]
        tail *= ((1.0 - top1) * (1.0 - miss))[:, None] / tail.sum(axis=1, keepdims=True)
        return np.concatenate([top1[:, None], tail], axis=1)

    def rank_probabilities(self) -> FloatArray:
        """Returns float64[64]: probability of each rank at depth 0, averaged over all positions."""
        result: FloatArray = self._group_shares @ self.shares @ self.class_probs
        return result

    def tokens(self, request_id: int, positions: IntArray) -> IntArray:
        drawn = hash_u64(self.seed, _TOKEN, request_id, positions)
        return (drawn % np.uint64(self.vocab_size)).astype(np.int64)

    def classes(self, request_id: int, positions: IntArray) -> IntArray:
        group = self._group(request_id)
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

    def node_keys(
        self, request_id: int, positions: IntArray, tokens: IntArray
    ) -> tuple[IntArray, IntArray]:
        first, drawn = hash_u64(self.seed, _NODE_STREAMS, request_id, positions, tokens)
        edges = self._class_edges[self._group(request_id)]
        classes = edges.searchsorted(as_uniform(drawn), side="right")
        return (first % np.uint64(self.vocab_size)).astype(np.int64), classes

    def _group(self, request_id: int) -> int:
        drawn = hash_uniform(self.seed, _GROUP, np.array([request_id]))
        return int(_drawn(self._group_shares, drawn)[0])


def _drawn(shares: FloatArray, uniform: FloatArray) -> IntArray:
    """Returns int64[n]: indices with probabilities ``shares``, by inverse CDF at ``uniform``[n]."""
    return np.searchsorted(np.cumsum(shares)[:-1], uniform, side="right")


class _RequestTables:
    """One request's target tokens, classes and ranks by position, and its nodes that match them.

    Attributes:
        on_path: ids of nodes known to be on the target's path; pruned nodes are removed later.
        expanded: ids of nodes that a draft model's cache would have; pruned ones are removed later.
        cached_len: number of committed tokens that a draft model's cache would have.
    """

    def __init__(self, pair: HiddenPair, request: RequestState) -> None:
        self.request = request
        self.on_path = {request.tree.root_id}
        self.cached_len = 0
        self.expanded: set[int] = set()
        self.tokens: IntArray = np.zeros(0, np.int64)
        self._pair = pair
        self.reserve(request.num_prompt + request.stop.max_new_tokens)

    def reserve(self, last: int) -> None:
        """Extends the tables so that they include position ``last`` + 1."""
        if last + 1 < len(self.tokens):
            return
        pair, positions = self._pair, np.arange(last + _TABLE)
        self.tokens = pair.tokens(self.request.id, positions)
        self.classes = pair.classes(self.request.id, positions)
        depths = range(pair.num_depths)
        self._ranks = [pair.ranks(self.request.id, positions, depth) for depth in depths]
        self._reach = pair.reach(self.request.id, positions)

    def rank(self, position: int) -> int:
        """Returns how many candidates precede the true one at the target path's ``position``."""
        root = self.request.prefix_len
        if self._reach is None:
            return int(self._ranks[min(position - root, len(self._ranks) - 1)][position])
        return 0 if position - root < self._reach[root] else MAX_RANK

    def is_on_path(self, slot: int) -> bool:
        """Returns whether the node at ``slot`` is on the target's own path."""
        tree = self.request.tree
        node_id = int(tree.ids[slot])
        if slot == 0 or node_id in self.on_path:
            return True
        if tree.tokens[slot] != self.tokens[tree.positions[slot]]:
            return False
        if not self.is_on_path(int(tree.parents[slot])):
            return False
        self.on_path.add(node_id)
        return True


class SyntheticSource(TokenSource):
    """Proposes a synthetic draft's candidates; counts and times its passes as a draft model's.

    Args:
        pair: target tokens and their ranks in the draft, or a ``ModelPair`` that contains these.
        model: name of the imitated model; a pass takes that model's time in a latency profile.
        prefill_chunk: maximum number of prompt rows per pass.
    """

    @validated
    def __init__(
        self,
        *,
        pair: HiddenPair | ModelPair,
        model: Literal["draft", "middle"] = "draft",
        prefill_chunk: Count = 512,
    ) -> None:
        self._pair: HiddenPair = pair.sequences(model) if isinstance(pair, ModelPair) else pair
        self.vocab_size = pair.vocab_size
        self.counters = SourceCounters(by_level={model: 0})
        self._work = Work(model)
        self._prefill_chunk = prefill_chunk
        self._tables: dict[int, _RequestTables] = {}
        self._logprobs = self._pair.class_logprobs
        self._offsets = np.arange(self._logprobs.shape[1])

    def open(self, request: RequestState) -> None:
        self._tables[request.id] = _RequestTables(self._pair, request)

    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        """Returns up to min(k, K) candidates of each node; K is 64, or the number recorded.

        On the target's path the true next token has its rank; elsewhere no candidate is true.
        """
        state.clock.start(CONTROLLER)  # no model call marks the start of the work
        k = min(k, len(self._offsets))
        parts = []
        catch_up = 0
        for request_id, ids in nodes.items:
            tables = self._tables[request_id]
            slots = tables.request.tree.live_slots(ids)
            parts.append(self._propose(tables, slots, k))
            tables.expanded.update(ids.tolist())
            catch_up += tables.request.prefix_len - tables.cached_len
            tables.cached_len = tables.request.prefix_len
        self._count(state, catch_up, len(nodes))
        classes = np.concatenate([classes for _, classes in parts])
        logprobs = self._logprobs[classes, :k]
        return Candidates(
            tokens=np.concatenate([tokens for tokens, _ in parts]),
            logprobs=logprobs,
            counts=(logprobs > -np.inf).sum(axis=1),
        )

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        for commit in commits:
            tables = self._tables.get(commit.request)
            if tables is None:
                continue
            position = commit.prefix_len - len(commit.retired_ids)
            for node_id in commit.retired_ids.tolist():
                if tables.cached_len == position and node_id in tables.expanded:
                    tables.cached_len += 1
                position += 1
            if len(tables.expanded) + len(tables.on_path) > _MAX_STALE:
                kept = set(commit.kept_ids.tolist())
                tables.expanded &= kept
                tables.on_path &= kept

    def close(self, request_id: int) -> None:
        self._tables.pop(request_id, None)

    def _propose(
        self, tables: _RequestTables, slots: IntArray, k: int
    ) -> tuple[IntArray, IntArray]:
        """Returns candidates int64[W, k] and classes int64[W] of the nodes ``slots``, int64[W]."""
        tree = tables.request.tree
        positions, node_tokens = tree.positions.take(slots), tree.tokens.take(slots)
        tables.reserve(int(positions.max()))
        first, classes = self._pair.node_keys(tables.request.id, positions, node_tokens)
        maybe = (slots == 0) | (node_tokens == tables.tokens.take(positions))
        true_rows = [row for row in maybe.nonzero()[0].tolist() if tables.is_on_path(slots[row])]
        for row in true_rows:
            position = int(positions[row])
            classes[row] = tables.classes[position]
            first[row] = tables.tokens[position + 1] + 1  # wrong candidates: the tokens after it
        tokens = first[:, None] + self._offsets[:k]
        if int(first.max()) + k > self._pair.vocab_size:
            tokens %= self._pair.vocab_size
        for row in true_rows:
            rank = tables.rank(int(positions[row]))
            if rank < k:
                tokens[row, rank] = tables.tokens[positions[row] + 1]
        return tokens, classes

    def _count(self, state: DecodeState, catch_up: int, num_nodes: int) -> None:
        self.counters.catch_up_rows += catch_up
        full = max(catch_up - 1, 0) // self._prefill_chunk  # the last chunk is in the nodes' pass
        rest = catch_up - full * self._prefill_chunk + num_nodes
        for num_rows in (*[self._prefill_chunk] * full, rest):
            self.counters.passes += 1
            self.counters.rows += num_rows
            self.counters.by_level[self._work.value] += 1
            state.clock.charge(CONTROLLER, self._work, num_rows)
