"""Early exit with verification after drafting (EESD): the target's first layers are the draft.

The front (layers 0 .. E - 1 and the exit head) is shared by the source, which drafts with it, and
the executor, which verifies with the layers from E on. Every row passes every layer once: what was
computed while drafting is not computed again, and its keys and values are committed once (PPSD
3.1). The last draft token passes the front when it is submitted (Eq. 4 counts gamma E + N). With
several exits (B.3) E is the last one's, and a node has passed as many segments of the front as it
was asked for.

Shape letters: R rows of a batch, W nodes, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from specdec.clocks import CONTROLLER, Clock, Work
from specdec.executors.answerer import Answerer
from specdec.executors.exits import ExitStage
from specdec.executors.local import LocalExecutor
from specdec.executors.row_packing import row_items
from specdec.executors.stage import Stage, StageOutput
from specdec.metrics.counters import SourceCounters
from specdec.state import batch_of
from specdec.types import NO_NODE, Batch, BoolArray, Commit, CommitKind, IntArray, Nodes

if TYPE_CHECKING:
    from specdec.state import DecodeState, RequestState


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The target's layers between two exits.

    Attributes:
        stage: the layers, with the head after the last of them.
        layer: layers of the target before that exit.
        stages: priced stages that the layers lie on, one after the other.
    """

    stage: ExitStage
    layer: int
    stages: int


class _Computed:
    """What a segment has computed of each live node: request -> node id -> row."""

    def __init__(self) -> None:
        self.hidden: dict[int, dict[int, torch.Tensor]] = {}
        self.logits: dict[int, dict[int, torch.Tensor]] = {}

    def open(self, request_id: int) -> None:
        self.hidden[request_id], self.logits[request_id] = {}, {}

    def keep(self, request_id: int, kept: set[int]) -> None:
        for store in (self.hidden, self.logits):
            rows = store[request_id]
            store[request_id] = {i: row for i, row in rows.items() if i in kept}

    def close(self, request_id: int) -> None:
        self.hidden.pop(request_id, None)
        self.logits.pop(request_id, None)


class ExitFront:
    """The target's first layers with one exit or several, and what they have computed.

    A node's hidden state waits after the last segment that it has passed until it goes on: to a
    later exit, or, submitted, to the rest of the target. Its exit logits wait until somebody asks
    for them.

    Attributes:
        layers: of the target before each exit, the first one first.
        counters: passes and rows by segment; rows that the prompt or the executor caused are not
            among them.
    """

    def __init__(self, *, segments: Sequence[Segment], clock: Clock) -> None:
        """Takes the layers up to the last exit, and the clock that is charged per pass."""
        self._segments = tuple(segments)
        self._done = [_Computed() for _ in self._segments]
        self._clock = clock
        self.layers = tuple(segment.layer for segment in self._segments)
        self.counters = SourceCounters()

    def page(self, num_blocks: int, block_tokens: int) -> None:
        """Puts the caches of all requests into pools of blocks; before the first request."""
        self._segments = tuple(
            replace(segment, stage=segment.stage.paged(num_blocks, block_tokens))
            for segment in self._segments
        )

    def open(self, request_id: int, max_len: int) -> None:
        """Makes room for a request of at most ``max_len`` tokens."""
        for segment, done in zip(self._segments, self._done, strict=True):
            segment.stage.open(request_id, max_len)
            done.open(request_id)

    def logits(
        self, state: DecodeState, nodes: Nodes, at: int = 0
    ) -> tuple[BoolArray, list[torch.Tensor]]:
        """Logits of nodes at exit number ``at``; a packed pass per segment for what is missing.

        Returns:
            bool[W], false for nodes of a request whose prompt is not through yet, and for nodes
            that were submitted without being asked for; and one [V] per node that is true.
        """
        for number in range(at + 1):
            missing = []
            for request_id, ids in nodes.items:
                request = state.requests[request_id]
                slots = self._missing(number, request, request.tree.slots(ids))
                if len(slots):
                    missing.append((request_id, request.tree.ids[slots]))
            if missing:
                batch = batch_of(state, Nodes(tuple(missing)))
                self._compute(number, batch, {}, wants_exits=number == at)
                self.counters.passes += 1
                self.counters.rows += batch.num_nodes
        store = self._done[at].logits
        known = [store[request_id].get(i) for request_id, ids in nodes.items for i in ids.tolist()]
        found = [row for row in known if row is not None]
        return np.array([row is not None for row in known], np.bool_), found

    def hidden(self, batch: Batch) -> torch.Tensor:
        """[R, E] of a batch after the last exit, in packing order.

        Prompts, and what nodes have not passed yet, run now.
        """
        prompts: dict[int, torch.Tensor] = {}
        for number, segment in enumerate(self._segments):
            trees = []
            for rows in batch.trees:
                new = ~segment.stage.cache(rows.request).has(rows.node_ids)
                if new.any():
                    trees.append(rows.keep(new))
            if trees or batch.prefills:
                part = replace(batch, trees=tuple(trees))
                prompts = self._compute(number, part, prompts, wants_exits=False)
        return self._packed(len(self._segments) - 1, batch, prompts)

    def commit(self, commits: Sequence[Commit]) -> None:
        """Applies commits to the caches, and drops what left the trees."""
        for segment in self._segments:
            segment.stage.commit(commits)
        for commit in commits:
            if commit.kind is not CommitKind.NONE:
                kept = set(commit.kept_ids.tolist())
                for done in self._done:
                    done.keep(commit.request, kept)

    def close(self, request_id: int) -> None:
        """Frees the request's caches."""
        for segment, done in zip(self._segments, self._done, strict=True):
            segment.stage.close(request_id)
            done.close(request_id)

    def _missing(self, number: int, request: RequestState, slots: IntArray) -> IntArray:
        """int64[M]: those slots and ancestors that have not passed a segment, topologically."""
        cache, tree = self._segments[number].stage.cache(request.id), request.tree
        if cache.cached_len < request.prefix_len:
            return slots[:0]
        found = above = slots[~cache.has(tree.ids[slots])]
        while len(above):
            parents = np.unique(tree.parents[above])
            parents = parents[parents != NO_NODE]
            above = parents[~cache.has(tree.ids[parents])]
            found = np.concatenate([above, found])
        return np.unique(found)

    def _compute(
        self,
        number: int,
        batch: Batch,
        prompts: Mapping[int, torch.Tensor],
        *,
        wants_exits: bool,
    ) -> dict[int, torch.Tensor]:
        """Runs a segment on rows that wait before it; keeps nodes' rows.

        Args:
            number: of the segment.
            batch: the rows.
            prompts: request -> hidden states of its prompt's rows, from the segment before.
            wants_exits: whether the head's logits are kept.

        Returns:
            Hidden states of prompts' rows by request.
        """
        clock, segment, done = self._clock, self._segments[number], self._done[number]
        before = self._packed(number - 1, batch, prompts) if number else None
        clock.start(CONTROLLER)
        out = segment.stage.run(batch, before, wants_exits=wants_exits)
        assert out.hidden is not None, "the front hands hidden states on"
        for _ in range(segment.stages):
            clock.charge(CONTROLLER, Work.STAGE, batch.num_tokens)
        for logits in out.exit_logits.values():
            clock.charge(CONTROLLER, Work.EXIT, batch.num_nodes)
            start = 0
            for rows in batch.trees:
                stop = start + len(rows.node_ids)
                found = zip(rows.node_ids.tolist(), logits[start:stop], strict=True)
                done.logits[rows.request].update(found)
                start = stop
        passed, start = {}, 0
        for item in row_items(batch):
            middle, stop = start + len(item.prefill_tokens), start + item.num_rows
            passed[item.request] = out.hidden[start:middle]
            if item.tree is not None:
                ids = item.tree.node_ids.tolist()
                done.hidden[item.request].update(zip(ids, out.hidden[middle:stop], strict=True))
            start = stop
        return passed

    def _packed(
        self, number: int, batch: Batch, prompts: Mapping[int, torch.Tensor]
    ) -> torch.Tensor:
        """[R, E]: takes away the batch's rows after segment ``number``, in packing order."""
        parts = []
        for item in row_items(batch):
            if item.prefill is not None:
                parts.append(prompts[item.request])
            if item.tree is not None:
                waiting = self._done[number].hidden[item.request]
                parts.append(torch.stack([waiting.pop(i) for i in item.tree.node_ids.tolist()]))
        return torch.cat(parts)


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
            rest: layers from the front's last exit on.
            answerer: turns their logits into answers.
            clock: charged per pass.
            stages: priced stages that the rest lies on, one after the other.
        """
        stage = FrontedStage(front=front, rest=rest)
        super().__init__(stage=stage, answerer=answerer, clock=clock, stages=stages)
