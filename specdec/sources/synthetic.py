"""A target and a draft without models (``model=synthetic``).

Every request has a hidden target sequence, a keyed hash of (request, position). At each position
the true next token has a *rank* among the draft's candidates. A keyed draw assigns each position to
one of a few difficulty classes, and each class has its own distribution of ranks. The draft's
candidate probabilities are that distribution, so the draft is confident where it is right. A
recorded run is a special case with one class per recorded position (``pairs/replay.py``).

Shape letters: W nodes, K candidates, C classes, M kept nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from specdec.clocks import CONTROLLER, Work
from specdec.executors.models import ModelPair
from specdec.interfaces import TokenSource
from specdec.metrics.counters import SourceCounters
from specdec.parts.fields import Count, validated
from specdec.sources.hit_law import MAX_RANK, HiddenPair
from specdec.types import Candidates, Commit, FloatArray, IntArray, Nodes, Output

if TYPE_CHECKING:
    from specdec.state import DecodeState, RequestState

_TABLE = 512  # positions tabulated at a time
_MAX_STALE = 4096  # number of node ids above which those of pruned nodes are dropped


class _RequestTables:
    """One request's sequence, classes and ranks by position, and its nodes on the target's path.

    Attributes:
        on_path: ids of nodes known to be on the target's path; pruned nodes are removed later.
        expanded: ids of nodes that a draft's cache would have; pruned nodes are removed later.
        cached_len: number of committed tokens that a draft's cache would have.
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
        depths = range(self._pair.num_depths)
        self._ranks = [self._pair.ranks(self.request.id, positions, depth) for depth in depths]
        self._reach = self._pair.reach(self.request.id, positions)

    def rank(self, position: int) -> int:
        """Returns the number of candidates before the true token, after the true node."""
        root = self.request.prefix_len
        if self._reach is None:
            return int(self._ranks[min(position - root, len(self._ranks) - 1)][position])
        return 0 if position - root < self._reach[root] else MAX_RANK

    def reserve(self, last: int) -> None:
        if last + 1 >= len(self.tokens):
            self._extend(last + _TABLE)

    def keep(self, ids: IntArray) -> None:
        """Drops all nodes except ``ids``, int64[M]."""
        kept = set(ids.tolist())
        self.expanded &= kept
        self.on_path &= kept

    def true_nodes(self, slots: IntArray, positions: IntArray, tokens: IntArray) -> list[int]:
        """Returns the indices of those ``slots`` that are on the target's own path."""
        same = tokens == self.tokens.take(positions)
        hits = (same | (slots == 0)).nonzero()[0]
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


class SyntheticSource(TokenSource):
    """The synthetic draft; counts and charges passes and rows as a draft model would.

    Args:
        pair: the hidden sequences and the draft's ranks, or a model pair that has them.
        model: the model's name, by which a latency profile prices its passes.
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
        hidden: HiddenPair = pair.sequences(model) if isinstance(pair, ModelPair) else pair
        self.vocab_size: int | None = pair.vocab_size
        self.counters = SourceCounters(by_level={model: 0})
        self._work = Work(model)
        self._pair = hidden
        self._prefill_chunk = prefill_chunk
        self._tables: dict[int, _RequestTables] = {}
        self._logprobs = hidden.class_logprobs
        self._laws: dict[int, tuple[FloatArray, IntArray]] = {}
        self._offsets = np.arange(self._logprobs.shape[1])

    def open(self, request: RequestState) -> None:
        self._tables[request.id] = _RequestTables(self._pair, request)

    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        """Returns up to min(k, K) candidates of each node (K is 64, or as recorded).

        On the target's path the true token has its rank; elsewhere all candidates are wrong.
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
        tokens, classes = parts[0]
        if len(parts) > 1:
            tokens = np.concatenate([tokens for tokens, _ in parts])
            classes = np.concatenate([classes for _, classes in parts])
        logprobs, counts = self._law(k)
        return Candidates(
            tokens=tokens, logprobs=logprobs.take(classes, axis=0), counts=counts.take(classes)
        )

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
            if len(tables.expanded) + len(tables.on_path) > _MAX_STALE:
                tables.keep(commit.kept_ids)

    def close(self, request_id: int) -> None:
        self._tables.pop(request_id, None)

    def _law(self, k: int) -> tuple[FloatArray, IntArray]:
        """Returns log probabilities float64[C, k] and counts int64[C] of the first k candidates."""
        if k not in self._laws:
            logprobs = np.ascontiguousarray(self._logprobs[:, :k])
            self._laws[k] = logprobs, (logprobs > -np.inf).sum(axis=1)
        return self._laws[k]

    def _propose(
        self, tables: _RequestTables, slots: IntArray, k: int
    ) -> tuple[IntArray, IntArray]:
        """Returns tokens int64[W, k] and classes int64[W]."""
        tree = tables.request.tree
        positions, node_tokens = tree.positions.take(slots), tree.tokens.take(slots)
        tables.reserve(int(positions.max()))
        first, classes = self._pair.node_keys(tables.request.id, positions, node_tokens)
        true_rows = tables.true_nodes(slots, positions, node_tokens)
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
        counters = self.counters
        counters.catch_up_rows += catch_up
        while catch_up > self._prefill_chunk:
            self._pass(state, self._prefill_chunk)
            catch_up -= self._prefill_chunk
        self._pass(state, catch_up + num_nodes)

    def _pass(self, state: DecodeState, num_rows: int) -> None:
        self.counters.passes += 1
        self.counters.rows += num_rows
        self.counters.by_level[self._work.value] += 1
        state.clock.charge(CONTROLLER, self._work, num_rows)
