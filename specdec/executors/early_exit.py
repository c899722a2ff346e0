"""Early exit with verification after drafting (EESD): the target's first layers are the draft.

The front (layers 0 .. E - 1 and the exit head) is shared by the source, which drafts with it, and
the executor, which verifies with the layers from E on. Every row passes every layer once: what was
computed while drafting is not computed again, and its keys and values are committed once (PPSD
3.1). The last draft token passes the front when it is submitted (Eq. 4 counts gamma E + N).

Shape letters: R rows of a batch, W nodes, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from specdec.clocks import CONTROLLER, Clock, Work
from specdec.executors.answering import Answerer
from specdec.executors.exits import ExitStage
from specdec.executors.layout import row_items
from specdec.executors.local import LocalExecutor
from specdec.executors.stage import Stage, StageOutput
from specdec.state import batch_of
from specdec.types import (
    NO_NODE,
    Batch,
    BoolArray,
    Commit,
    CommitKind,
    IntArray,
    Nodes,
    SourceCounters,
)

if TYPE_CHECKING:
    from specdec.state import DecodeState, RequestState


class ExitFront:
    """The target's first layers with their exit head, and what they have computed.

    A node's hidden state waits here from the moment it is computed until the node is submitted;
    its exit logits until somebody asks for them.

    Attributes:
        counters: passes and rows; rows that the prompt or the executor caused are not among them.
    """

    def __init__(self, *, stage: ExitStage, clock: Clock, stages: int) -> None:
        """Takes the layers.

        Args:
            stage: layers 0 .. E - 1 with the head.
            clock: charged per pass.
            stages: priced stages that the layers lie on, one after the other.
        """
        self._stage = stage
        self._clock = clock
        self._stages = stages
        self._hidden: dict[int, dict[int, torch.Tensor]] = {}
        self._logits: dict[int, dict[int, torch.Tensor]] = {}
        self.counters = SourceCounters()

    def open(self, request_id: int, max_len: int) -> None:
        """Makes room for a request of at most ``max_len`` tokens."""
        self._stage.open(request_id, max_len)
        self._hidden[request_id], self._logits[request_id] = {}, {}

    def logits(self, state: DecodeState, nodes: Nodes) -> tuple[BoolArray, list[torch.Tensor]]:
        """Exit logits of nodes, in one packed pass over those that have not been computed.

        Returns:
            bool[W], false for nodes of a request whose prompt is not through yet, and for nodes
            that were submitted without being asked for; and one [V] per node that is true.
        """
        missing = []
        for request_id, ids in nodes.items:
            request = state.requests[request_id]
            slots = self._missing(request, request.tree.slots(ids))
            if len(slots):
                missing.append((request_id, request.tree.ids[slots]))
        if missing:
            batch = batch_of(state, Nodes(tuple(missing)))
            self._compute(batch, wants_exits=True)
            self.counters.passes += 1
            self.counters.rows += batch.num_nodes
        known = [
            self._logits[request_id].get(i) for request_id, ids in nodes.items for i in ids.tolist()
        ]
        found = [row for row in known if row is not None]
        return np.array([row is not None for row in known], np.bool_), found

    def hidden(self, batch: Batch) -> torch.Tensor:
        """[R, E] of a batch in packing order: prompts and what nobody has asked for run now."""
        trees = []
        for rows in batch.trees:
            waiting = self._hidden[rows.request]
            new = np.array([i not in waiting for i in rows.node_ids.tolist()], np.bool_)
            if new.any():
                trees.append(rows.keep(new))
        prompts: dict[int, torch.Tensor] = {}
        if trees or batch.prefills:
            prompts = self._compute(replace(batch, trees=tuple(trees)), wants_exits=False)
        parts = []
        for item in row_items(batch):
            if item.prefill is not None:
                parts.append(prompts[item.request])
            if item.tree is not None:
                waiting = self._hidden[item.request]
                parts.append(torch.stack([waiting.pop(i) for i in item.tree.node_ids.tolist()]))
        return torch.cat(parts)

    def commit(self, commits: Sequence[Commit]) -> None:
        """Applies commits to the caches, and drops what left the trees."""
        self._stage.commit(commits)
        for commit in commits:
            if commit.kind is CommitKind.NONE:
                continue
            kept = set(commit.kept_ids.tolist())
            for store in (self._hidden, self._logits):
                rows = store[commit.request]
                store[commit.request] = {i: row for i, row in rows.items() if i in kept}

    def close(self, request_id: int) -> None:
        """Frees the request's caches."""
        self._stage.close(request_id)
        self._hidden.pop(request_id, None)
        self._logits.pop(request_id, None)

    def _missing(self, request: RequestState, slots: IntArray) -> IntArray:
        """int64[M]: those slots and ancestors of theirs that have no entry, topologically."""
        cache, tree = self._stage.cache(request.id), request.tree
        if cache.cached_len < request.prefix_len:
            return slots[:0]
        found = above = slots[~cache.has(tree.ids[slots])]
        while len(above):
            parents = np.unique(tree.parents[above])
            parents = parents[parents != NO_NODE]
            above = parents[~cache.has(tree.ids[parents])]
            found = np.concatenate([above, found])
        return np.unique(found)

    def _compute(self, batch: Batch, *, wants_exits: bool) -> dict[int, torch.Tensor]:
        """Runs the front; keeps nodes' rows and returns those of prompts by request."""
        clock = self._clock
        clock.start(CONTROLLER)
        out = self._stage.run(batch, None, wants_exits=wants_exits)
        assert out.hidden is not None, "the front hands hidden states on"
        for _ in range(self._stages):
            clock.charge(CONTROLLER, Work.STAGE, batch.num_tokens)
        if out.exit_logits is not None:
            clock.charge(CONTROLLER, Work.EXIT, batch.num_nodes)
            start = 0
            for rows in batch.trees:
                stop = start + len(rows.node_ids)
                found = out.exit_logits[start:stop]
                self._logits[rows.request].update(zip(rows.node_ids.tolist(), found, strict=True))
                start = stop
        prompts, start = {}, 0
        for item in row_items(batch):
            middle, stop = start + len(item.prefill_tokens), start + item.num_rows
            prompts[item.request] = out.hidden[start:middle]
            if item.tree is not None:
                ids = item.tree.node_ids.tolist()
                self._hidden[item.request].update(zip(ids, out.hidden[middle:stop], strict=True))
            start = stop
        return prompts


class FrontedStage:
    """The whole target: what the front has computed, then the layers from the exit on."""

    def __init__(self, *, front: ExitFront, rest: Stage) -> None:
        """Composes the two.

        Args:
            front: shared with the source.
            rest: layers E .. N - 1.
        """
        self._parts = (front, rest)

    def open(self, request_id: int, max_len: int) -> None:
        """Makes room for a request in both parts."""
        for part in self._parts:
            part.open(request_id, max_len)

    def run(self, batch: Batch, hidden: torch.Tensor | None) -> StageOutput:
        """Runs the batch through the layers that it has not passed."""
        front, rest = self._parts
        return rest.run(batch, front.hidden(batch))

    def commit(self, commits: Sequence[Commit]) -> None:
        """Prunes both parts' caches."""
        for part in self._parts:
            part.commit(commits)

    def close(self, request_id: int) -> None:
        """Frees both parts' caches."""
        for part in self._parts:
            part.close(request_id)


class EarlyExitExecutor(LocalExecutor):
    """Verifies what the front has drafted, with the layers from the exit on; latency 1."""

    def __init__(
        self, *, front: ExitFront, rest: Stage, answerer: Answerer, clock: Clock, stages: int
    ) -> None:
        """Composes the executor.

        Args:
            front: shared with the source; it charges the clock for its own passes.
            rest: layers E .. N - 1.
            answerer: turns their logits into answers.
            clock: charged per pass.
            stages: priced stages that the rest lies on, one after the other.
        """
        stage = FrontedStage(front=front, rest=rest)
        super().__init__(stage=stage, answerer=answerer, clock=clock, stages=stages)
