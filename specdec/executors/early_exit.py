"""Early exit with verification after drafting (EESD): the target's first layers are the draft.

The *first stage* (layers before the exit, and the exit head) is shared by the source, which drafts
with it, and the executor, which verifies with the remaining layers. Every row passes every layer
once: the results of drafting are reused for verification, and keys and values are committed once
(PPSD 3.1). The last draft token passes the first stage when it is submitted (Eq. 4 counts gamma E +
N layers for an exit after E of N layers). With several exits (B.3) the first stage ends at the last
one, and each node has passed only the *segments* between exits that were needed so far.

Shape letters: R rows of a batch, W nodes, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from specdec.clocks import CONTROLLER, Clock, Work
from specdec.clocks.meter import Meter
from specdec.errors import UserError
from specdec.executors.exits import ExitStage
from specdec.executors.layout import EarlyExitPlan
from specdec.executors.local import LocalExecutor
from specdec.executors.models import Blocks, ModelPair
from specdec.executors.stage import StageGroup, StageOutput, row_items, tree_slices
from specdec.metrics.counters import SourceCounters
from specdec.parts.fields import Count
from specdec.sampling.keyed_draws import KeyedDraws
from specdec.state import DecodeState, RequestState, batch_of
from specdec.types import Batch, BoolArray, Commit, IntArray, Needs, NodeMap, Nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    stage: ExitStage  # the layers and the exit head after the last of them
    layer: int  # number of target layers before that exit
    stages: int  # number of stages of the latency profile that the layers are charged as


class FirstStage(StageGroup):
    """The target's first ``num_layers`` layers with one or more exits, and their results for live
    nodes.

    A node's hidden state after the last segment that it has passed is stored until a later segment
    or, once the node is submitted, the rest of the target needs it. ``counters`` has the passes and
    rows of drafting, counted once per segment; what ``hidden`` computes is not counted.
    """

    def __init__(self, *, segments: Sequence[Segment], clock: Clock) -> None:
        super().__init__([segment.stage for segment in segments])
        self._segments = tuple(segments)
        self._hidden: list[NodeMap[torch.Tensor]] = [NodeMap() for _ in self._segments]
        self._logits: list[NodeMap[torch.Tensor]] = [NodeMap() for _ in self._segments]
        self._results = *self._hidden, *self._logits
        self._clock = clock
        self.num_layers = self._segments[-1].layer
        self.counters = SourceCounters()

    @staticmethod
    def of(
        plan: EarlyExitPlan,
        layers: Sequence[int],
        *,
        pair: ModelPair,
        clock: Clock,
        meter: Meter,
    ) -> FirstStage:
        """Loads the layers before the last exit, and the exit heads. ``layers`` has the number of
        layers before each exit, increasing. Passes are charged as passes of the stages in ``plan``.
        """
        bounds = plan.bounds(pair, pair.exit_layer)
        segments = [
            Segment(
                stage=pair.exit_stage(start, layer, meter, (layer,)),
                layer=layer,
                stages=sum(first < layer and last > start for first, last in bounds),
            )
            for start, layer in pairwise([0, *layers])
        ]
        return FirstStage(segments=segments, clock=clock)

    def open(self, request_id: int, max_len: int) -> None:
        super().open(request_id, max_len)
        for results in self._results:
            results.open(request_id)

    def logits(
        self, state: DecodeState, nodes: Nodes, at: int = 0
    ) -> tuple[BoolArray, list[torch.Tensor]]:
        """Returns (available bool[W], logits [V] of each available node) of exit ``at`` (from 0).

        Computes the segments that nodes have not passed, in one packed pass each. Nodes are not
        available while their prompt is prefilled, or if submitted before this was called for them.
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
        rows = self._logits[at].get(nodes)
        available = np.array([row is not None for row in rows], np.bool_)
        return available, [row for row in rows if row is not None]

    def hidden(self, batch: Batch) -> torch.Tensor:
        """Returns [R, E]: hidden states of a batch's rows after the last exit, in packing order;
        computes the segments that rows have not passed yet.
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
        super().commit(commits)
        for results in self._results:
            results.commit(commits)

    def close(self, request_id: int) -> None:
        super().close(request_id)
        for results in self._results:
            results.close(request_id)

    def _missing(self, number: int, request: RequestState, slots: IntArray) -> IntArray:
        cache, tree = self._segments[number].stage.cache(request.id), request.tree
        if cache.cached_len < request.prefix_len:
            return slots[:0]
        new = slots[~cache.has(tree.ids[slots])]
        return tree.with_missing_ancestors(new, cache.has)

    def _compute(
        self, number: int, batch: Batch, prompts: Mapping[int, torch.Tensor], *, wants_exits: bool
    ) -> dict[int, torch.Tensor]:
        """Runs segment ``number`` over rows that have passed the segments before it, and stores the
        results of tree nodes.

        ``prompts`` maps requests to hidden states of their prompt rows after the previous segment;
        the result maps them to those after this segment.
        """
        clock, segment = self._clock, self._segments[number]
        before = self._packed(number - 1, batch, prompts) if number else None
        clock.start(CONTROLLER)
        out = segment.stage.run(batch, before, wants_exits=wants_exits)
        assert out.hidden is not None, "a segment returns hidden states"
        for _ in range(segment.stages):
            clock.charge(CONTROLLER, Work.STAGE, batch.num_tokens)
        for logits in out.exit_logits.values():
            clock.charge(CONTROLLER, Work.EXIT, batch.num_nodes)
            for tree, rows in tree_slices(batch.trees):
                self._logits[number].update(tree.request, tree.node_ids, logits[rows])
        passed = {}
        for item in row_items(batch):
            passed[item.request] = out.hidden[item.prompt_rows]
            if item.tree is not None:
                states = out.hidden[item.tree_rows]
                self._hidden[number].update(item.request, item.tree.node_ids, states)
        return passed

    def _packed(
        self, number: int, batch: Batch, prompts: Mapping[int, torch.Tensor]
    ) -> torch.Tensor:
        parts = []
        for item in row_items(batch):
            if item.prefill is not None:
                parts.append(prompts[item.request])
            if item.tree is not None:
                hidden = self._hidden[number][item.request]
                parts.append(torch.stack([hidden.pop(i) for i in item.tree.node_ids.tolist()]))
        return torch.cat(parts)


class _WholeTarget(StageGroup):
    def run(self, batch: Batch, hidden: torch.Tensor | None) -> StageOutput:
        first_stage, rest = self._parts
        return rest.run(batch, first_stage.hidden(batch))


class EarlyExitExecutor(LocalExecutor):
    @classmethod
    def plan(cls, models: ModelPair, *, stages: Count | None = None) -> EarlyExitPlan:
        """Places all layers on the controller's device. A pass is charged as one through ``stages``
        stages of the latency profile; default: ceil(layers / exit layer).
        """
        stages = stages or -(-models.num_layers // models.exit_layer)
        return EarlyExitPlan.of_stages(models, stages)

    @classmethod
    def build(
        cls,
        plan: Any,
        needs: Needs,
        *,
        pair: ModelPair,
        clock: Clock,
        meter: Meter,
        draws: KeyedDraws,
        blocks: Blocks,
        first_stage: FirstStage | None = None,
    ) -> EarlyExitExecutor:
        if first_stage is None:
            raise UserError(
                "executor=early_exit verifies drafts of the target's first layers: use it with"
                " source=early_exit, or choose executor=local or executor=pipeline"
            )
        after = first_stage.num_layers
        rest = pair.stage(after, pair.num_layers, meter)
        return cls(
            stage=_WholeTarget((first_stage, rest)).paged(*blocks),
            answerer=pair.answerer(draws=draws, needs_probs=needs.target_probs),
            clock=clock,
            stages=sum(last > after for _, last in plan.bounds(pair, pair.exit_layer)),
        )
