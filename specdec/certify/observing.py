"""Records what the models of a running strategy compute and what its trees contain.

The pair creates the models, so it can observe every cache made of them, also inside parts from
other packages: those of stages, drafts and staged levels. The token and the parent of each entry
are recorded when its row is computed, independently of the cache's own bookkeeping.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from specdec.attention.tree_attention import EMPTY, TreeCache
from specdec.clocks import ClockKind
from specdec.clocks.meter import Meter
from specdec.compose.workbench import Parts
from specdec.models.config_values import config_value
from specdec.models.runner import ModelRunner
from specdec.pairs import RandomPair
from specdec.state import DecodeState, RequestState
from specdec.tensor_parallel import Collective, HeadSplit
from specdec.types import NO_NODE, Candidates, Commit, IntArray, Nodes, Ticket, TreeRows


def observe(
    owner: Any,
    name: str,
    *,
    before: Callable[..., None] | None = None,
    after: Callable[..., None] | None = None,
) -> None:
    """Makes a method of one object call ``before(*args)``, then ``after(result, *args)``."""
    method = getattr(owner, name)

    def observed(*args: Any, **options: Any) -> Any:
        if before is not None:
            before(*args, **options)
        result = method(*args, **options)
        if after is not None:
            after(result, *args, **options)
        return result

    owner.__dict__[name] = observed


@dataclass(slots=True)
class Shadow:
    """The rows computed into one cache.

    Attributes:
        nodes: (token, parent id, position) of every tree row computed into the cache, by node id.
        num_computed: length of the committed prefix that has been computed into the cache.
        real: whether all node ids were those of the request's tree (not of a source's own).
        heads: key/value heads in the cache (a rank's share), -1 for padding; None for all.
    """

    cache: TreeCache
    runner: ModelRunner  # the model that fills the cache
    request: RequestState | None  # None if unknown
    heads: tuple[int, ...] | None = None
    nodes: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    repeated: list[int] = field(default_factory=list)  # node ids computed more than once
    node_rows: int = 0  # tree rows computed
    catch_up_rows: int = 0  # committed tokens computed
    num_computed: int = 0
    repeated_catch_up: int = 0  # of them, those computed before
    real: bool = True

    def record(self, *, prefix_tokens: IntArray = EMPTY, tree: TreeRows | None = None) -> None:
        """Records the rows that are about to be computed."""
        start, num = self.cache.cached_len, len(prefix_tokens)
        self.catch_up_rows += num
        self.repeated_catch_up += max(0, min(start + num, self.num_computed) - start)
        self.num_computed = max(self.num_computed, start + num)
        if tree is None:
            return
        self.node_rows += len(tree.node_ids)
        self.real = self.real and self._is_real(tree.node_ids, tree.tokens)
        columns = (tree.node_ids, tree.tokens, tree.parent_ids, tree.positions)
        for node_id, *row in zip(*(column.tolist() for column in columns), strict=True):
            if node_id in self.nodes:
                self.repeated.append(node_id)
            self.nodes[node_id] = tuple(row)

    def commit(self, commit: Commit) -> None:
        """Counts the committed nodes that had been computed as committed tokens."""
        position = commit.prefix_len - len(commit.retired_ids)
        for node_id in commit.retired_ids.tolist():
            self.num_computed += node_id in self.nodes and self.num_computed == position
            position += 1

    def _is_real(self, ids: IntArray, tokens: IntArray) -> bool:
        if self.request is None or not len(ids):
            return self.request is not None
        tree = self.request.tree
        slots = tree.slots(ids)
        return bool((slots >= 0).all() and (tree.tokens[slots] == tokens).all())

    def path(self, node_id: int, cached_len: int, committed: IntArray) -> tuple[int, ...]:
        """Returns the tokens up to a node: the cached prefix, the node's ancestors and the node."""
        chain = []
        while node_id in self.nodes and self.nodes[node_id][2] >= cached_len:
            token, node_id, _ = self.nodes[node_id]
            chain.append(token)
        return (*committed[:cached_len].tolist(), *reversed(chain))


class Watch:
    """The events recorded in one run.

    Attributes:
        num_rows: rows of all passes, by model name; ``counted_rows`` by the source itself.
        expanded: (request, node id) that the source had to expand, and their ancestors.
        snapshots: each request's tree when last submitted, see ``snapshot``.
        beyond: (request, node id) -> position of submitted nodes that cannot be emitted.
        in_thread: whether the source's passes run in a thread, so that its caches change while
            they would be inspected.
        proposed: (request, node id) -> candidates that an asynchronous source has returned.
    """

    def __init__(self) -> None:
        self.shadows: list[Shadow] = []
        self.num_rows: Counter[str] = Counter()
        self.counted_rows = 0
        self.expanded: set[tuple[int, int]] = set()
        self.snapshots: dict[int, dict[int, tuple[int, int]]] = {}
        self.beyond: dict[tuple[int, int], int] = {}
        self.is_asynchronous = self.in_thread = False
        self.proposed: dict[tuple[int, int], list[int]] = {}
        self._state: DecodeState | None = None

    @property
    def drafts(self) -> list[Shadow]:
        """The caches of draft models that can be inspected between steps."""
        return [s for s in self.shadows if s.runner.name != "target" and not self.in_thread]

    def pair(self, pair: RandomPair) -> None:
        """Observes the models that parts make of ``pair``."""

        def runner(
            made: ModelRunner, _name: str, _meter: Meter, group: Collective | None = None
        ) -> None:
            self.model(made, None if group is None else _heads(made, pair.draft, group))

        observe(pair, "runner", after=runner)
        observe(pair, "stage", after=lambda stage, *_, **__: self.model(stage.runner))

    def model(self, runner: ModelRunner, heads: tuple[int, ...] | None = None) -> None:
        """Observes the passes and new caches of a model; ``heads`` is as in ``Shadow``."""

        def cache(cache: TreeCache, *_: Any) -> None:
            # Parts create caches in `open`, for the request that was admitted last.
            requests = [] if self._state is None else list(self._state.requests.values())
            shadow = Shadow(cache, runner, requests[-1] if requests else None, heads)
            self.shadows.append(shadow)
            observe(cache, "rows", before=shadow.record)

        def count(rows: Sequence[Any], **_: Any) -> None:
            self.num_rows[runner.name] += sum(map(len, rows))

        observe(runner, "new_cache", after=cache)
        observe(runner, "forward", before=count)

    def parts(self, parts: Parts, state: DecodeState) -> None:
        self._state = state
        levels = parts.source.levels
        self.is_asynchronous = levels[0].asynchronous or levels[0] is not parts.source
        self.in_thread = self.is_asynchronous and parts.clock.kind is ClockKind.MEASURED

        def expanded(candidates: Candidates, _state: DecodeState, nodes: Nodes, _k: int) -> None:
            if self.is_asynchronous:
                self._record_candidates(nodes, candidates)

        def polled(candidates: Candidates | None, ticket: Ticket) -> None:
            if candidates is not None:
                self._record_candidates(ticket.nodes, candidates)

        observe(parts.executor, "submit", before=lambda _: self._record_trees(state))
        observe(parts.source, "expand", before=self._record_expansion, after=expanded)
        for number, level in enumerate(levels if self.is_asynchronous else ()):
            observe(level, "start", before=self._record_expansion)
            if number == 0:  # the candidates of the others stay inside them
                observe(level, "poll", after=polled)

    def step(self, commits: Sequence[Commit]) -> None:
        """Updates which committed tokens each cache has received, from the commits of a step."""
        for shadow in self.shadows:
            for commit in commits:
                if shadow.request is not None and shadow.request.id == commit.request:
                    shadow.commit(commit)

    def _record_expansion(self, state: DecodeState, nodes: Nodes, _k: int) -> None:
        for request_id, ids in nodes.items:
            tree = state.requests[request_id].tree
            for slot in tree.slots(ids).tolist():
                path = tree.ids[tree.path(slot)].tolist()
                self.expanded |= {(request_id, node_id) for node_id in path}

    def _record_trees(self, state: DecodeState) -> None:
        for request in state.requests.values():
            self.snapshots[request.id] = snapshot(request)
            if not request.finished:
                tree = request.tree
                last = request.num_prompt - 1 + request.stop.max_new_tokens
                for slot in np.flatnonzero(tree.positions > last).tolist():
                    self.beyond[request.id, int(tree.ids[slot])] = int(tree.positions[slot])

    def _record_candidates(self, nodes: Nodes, candidates: Candidates) -> None:
        for request_id, ids, rows in nodes.packed():
            part = zip(candidates.tokens[rows], candidates.counts[rows], strict=True)
            for node_id, (tokens, count) in zip(ids.tolist(), part, strict=True):
                self.proposed[request_id, node_id] = tokens[:count].tolist()


def _heads(
    runner: ModelRunner, model: PreTrainedModel, group: Collective
) -> tuple[int, ...] | None:
    """Returns a rank's key/value heads, -1 for padding; None if the family's are not split."""
    config = model.config.get_text_config()
    num_heads = int(config.num_attention_heads)
    num_kv_heads = int(config_value(config, "num_key_value_heads", num_heads))
    share = HeadSplit.of(num_heads, num_kv_heads, rank=group.rank, size=group.size).key_value
    if runner.spec.num_kv_heads != len(share):
        return None
    return tuple(-1 if piece.pad else piece.start for piece in share)


def snapshot(request: RequestState) -> dict[int, tuple[int, int]]:
    """Maps each node id of a request's tree to (parent id, token)."""
    tree = request.tree
    parents = np.where(tree.parents == NO_NODE, NO_NODE, tree.ids[tree.parents])
    nodes = zip(parents.tolist(), tree.tokens.tolist(), strict=True)
    return dict(zip(tree.ids.tolist(), nodes, strict=True))
