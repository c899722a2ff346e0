"""Looking into a running strategy from outside: what its models computed and what its trees held.

The pair hands out the models, so it can watch every cache that any part makes of them: a stage's, a
draft's, a staged level's, also inside parts from elsewhere. What each entry ought to hold is noted
when its row is computed, by token and parent, and never asked of the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from specdec.attention.kv_cache import EMPTY, Rows, TreeCache
from specdec.attention.kv_storage import BlockPool
from specdec.clocks.meter import Meter
from specdec.compose.workbench import Parts
from specdec.executors.stage import ModelStage
from specdec.models import ModelRunner
from specdec.pairs import RandomPair
from specdec.state import DecodeState, RequestState
from specdec.tensor_parallel import Collective, HeadSplit
from specdec.types import NO_NODE, Candidates, Commit, CommitKind, IntArray, Nodes


@dataclass(frozen=True, slots=True)
class Node:
    """A node as its row was computed."""

    token: int
    parent: int
    position: int


@dataclass(slots=True)
class Shadow:
    """What is known of one cache without asking it.

    Attributes:
        cache, runner: that are watched.
        request: whose it is; None where that could not be told.
        nodes: id -> node, of every tree row that was computed into it.
        repeated: ids that were computed more than once.
        node_rows, catch_up_rows: rows computed.
        real: whether all ids so far were those of the request's own tree (a staged source numbers
            its nodes itself).
        heads: which key/value heads the cache holds (a rank's share), -1 for padding; None: all.
    """

    cache: TreeCache
    runner: ModelRunner
    request: RequestState | None
    nodes: dict[int, Node] = field(default_factory=dict)
    repeated: list[int] = field(default_factory=list)
    node_rows: int = 0
    catch_up_rows: int = 0
    real: bool = True
    heads: tuple[int, ...] | None = None

    def note(self, ids: IntArray, tokens: IntArray, parents: IntArray, places: IntArray) -> None:
        """Records tree rows that are about to be computed."""
        self.node_rows += len(ids)
        self.real = self.real and self._is_real(ids, tokens)
        found = zip(ids.tolist(), tokens.tolist(), parents.tolist(), places.tolist(), strict=True)
        for node_id, token, parent, position in found:
            if node_id in self.nodes:
                self.repeated.append(node_id)
            self.nodes[node_id] = Node(token, parent, position)

    def _is_real(self, ids: IntArray, tokens: IntArray) -> bool:
        if self.request is None or not len(ids):
            return self.request is not None
        tree = self.request.tree
        slots = tree.slots(ids)
        return bool((slots >= 0).all() and (tree.tokens[slots] == tokens).all())

    def path(self, node_id: int, cached_len: int, committed: IntArray) -> tuple[int, ...]:
        """Tokens up to a node: the committed ones in the cache, then its ancestors and itself."""
        chain = []
        while node_id in self.nodes and self.nodes[node_id].position >= cached_len:
            node = self.nodes[node_id]
            chain.append(node.token)
            node_id = node.parent
        return (*committed[:cached_len].tolist(), *reversed(chain))


class Watch:
    """Everything that is watched in one run.

    Attributes:
        shadows: one per cache, in order of creation.
        passes: rows per pass of each model, by its name.
        asked: (request, node id) that the source was asked about, their ancestors included.
        sees_questions: whether ``asked`` and ``catch_up`` could be noted.
        catch_up: committed tokens that the draft lacked whenever it was asked.
        snapshots: request -> node id -> (parent id, token), as last submitted.
    """

    def __init__(self) -> None:
        self.shadows: list[Shadow] = []
        self.passes: dict[str, list[int]] = {}
        self.asked: set[tuple[int, int]] = set()
        self.sees_questions = False
        self.catch_up = 0
        self.snapshots: dict[int, dict[int, tuple[int, int]]] = {}
        self._cached: dict[int, int] = {}
        self._state: DecodeState | None = None

    def model(self, runner: ModelRunner, heads: tuple[int, ...] | None = None) -> None:
        """Watches a model: its passes, and the caches that it makes, of some of its ``heads``."""
        new_cache, forward = runner.new_cache, runner.forward
        passes = self.passes.setdefault(runner.name, [])

        def watched_cache(capacity: int, *pool: BlockPool) -> TreeCache:
            cache = new_cache(capacity, *pool)
            self._watch_cache(cache, runner)
            self.shadows[-1].heads = heads
            return cache

        def counted(rows: Sequence[Rows], **options: Any) -> Any:
            passes.append(sum(map(len, rows)))
            return forward(rows, **options)

        runner.__dict__.update(new_cache=watched_cache, forward=counted)

    def parts(self, parts: Parts, state: DecodeState) -> None:
        """Watches what the source is asked and what the executor is given."""
        self._state = state
        expand, submit = parts.source.expand, parts.executor.submit

        def asked(state: DecodeState, nodes: Nodes, k: int) -> Candidates:
            self._note_asked(state, nodes)
            return expand(state, nodes, k)

        def submitted(batch: Any) -> None:
            for request in state.requests.values():
                self.snapshots[request.id] = snapshot(request)
            submit(batch)

        _replace(parts.executor, "submit", submitted)
        self.sees_questions = _replace(parts.source, "expand", asked)

    def step(self, commits: Sequence[Commit]) -> None:
        """Follows decisions, to know what the draft's prefix lacks."""
        for commit in commits:
            if commit.kind is CommitKind.NONE or commit.request not in self._cached:
                continue
            position = commit.prefix_len - len(commit.retired_ids)
            for node_id in commit.retired_ids.tolist():
                known = (commit.request, node_id) in self.asked
                if known and self._cached[commit.request] == position:
                    self._cached[commit.request] += 1
                position += 1

    def _note_asked(self, state: DecodeState, nodes: Nodes) -> None:
        for request_id, ids in nodes.items:
            request = state.requests[request_id]
            for slot in request.tree.slots(ids).tolist():
                path = request.tree.ids[request.tree.path(slot)].tolist()
                self.asked |= {(request_id, node_id) for node_id in path}
            self.catch_up += request.prefix_len - self._cached.get(request_id, 0)
            self._cached[request_id] = request.prefix_len

    def _watch_cache(self, cache: TreeCache, runner: ModelRunner) -> None:
        # Parts make caches when a request is opened, which the scheduler has just admitted.
        requests = [] if self._state is None else list(self._state.requests.values())
        shadow = Shadow(cache, runner, requests[-1] if requests else None)
        self.shadows.append(shadow)
        rows = cache.rows

        def noted(
            *,
            prefix_tokens: IntArray = EMPTY,
            node_ids: IntArray = EMPTY,
            node_tokens: IntArray = EMPTY,
            parent_ids: IntArray = EMPTY,
            node_positions: IntArray = EMPTY,
        ) -> Rows:
            shadow.catch_up_rows += len(prefix_tokens)
            shadow.note(node_ids, node_tokens, parent_ids, node_positions)
            return rows(
                prefix_tokens=prefix_tokens,
                node_ids=node_ids,
                node_tokens=node_tokens,
                parent_ids=parent_ids,
                node_positions=node_positions,
            )

        cache.__dict__["rows"] = noted


def _replace(part: object, name: str, function: Callable[..., Any]) -> bool:
    """Puts ``function`` in the place of a part's method; False where the part has fixed slots."""
    try:
        setattr(part, name, function)
    except AttributeError:
        return False
    return True


class ObservedPair(RandomPair):
    """A random pair whose models are watched."""

    def __init__(self, watch: Watch, **keys: Any) -> None:
        """Describes the models as ``RandomPair`` does."""
        super().__init__(**keys)
        self._watch = watch

    def stage(
        self,
        first: int,
        last: int,
        meter: Meter,
        group: Collective | None = None,
        capture_layers: Sequence[int] = (),
    ) -> ModelStage:
        """A watched slice of the target."""
        stage = super().stage(first, last, meter, group, capture_layers)
        self._watch.model(stage.runner)
        return stage

    def draft_runner(self, meter: Meter, group: Collective | None = None) -> ModelRunner:
        """The watched draft."""
        runner = super().draft_runner(meter, group)
        self._watch.model(runner, None if group is None else _heads(runner, self.draft, group))
        return runner


def _heads(
    runner: ModelRunner, model: PreTrainedModel, group: Collective
) -> tuple[int, ...] | None:
    """The key/value heads of a rank's share; None where its family leaves attention whole."""
    config = model.config.get_text_config()
    num_heads = int(config.num_attention_heads)
    num_kv_heads = int(getattr(config, "num_key_value_heads", None) or num_heads)
    share = HeadSplit.of(num_heads, num_kv_heads, rank=group.rank, size=group.size).key_value
    if runner.spec.num_kv_heads != len(share):
        return None
    return tuple(-1 if piece.pad else piece.start for piece in share)


def snapshot(request: RequestState) -> dict[int, tuple[int, int]]:
    """Node id -> (parent id, token) of a request's tree."""
    tree = request.tree
    parents = np.where(tree.parents == NO_NODE, NO_NODE, tree.ids[tree.parents])
    found = zip(tree.ids.tolist(), parents.tolist(), tree.tokens.tolist(), strict=True)
    return {node_id: (parent, token) for node_id, parent, token in found}
