"""Pipeline stages with early-exit heads (PPSD 4.1, B.3).

A head computes every row of its stage, prompts included, so the cache of a transformer head always
has the same entries as its stage's cache, and both apply the same commits.

Shape letters: R rows of a batch, W tree rows among them, E hidden size, V vocabulary, K candidates.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from specdec.attention.tree_attention import TreeCache
from specdec.clocks.meter import Meter
from specdec.device import to_device
from specdec.executors.stage import (
    ModelStage,
    Stage,
    StageGroup,
    StageOutput,
    row_items,
    tree_row_index,
)
from specdec.types import Batch, HiddenName


class NormHead(Stage):
    def __init__(self, *, norm: nn.Module, output: nn.Module, meter: Meter) -> None:
        self._norm = norm
        self._output = output
        self._meter = meter

    def run(
        self, batch: Batch, hidden: torch.Tensor | None, *, wants_logits: bool = True
    ) -> StageOutput:
        """Returns logits [W, V] of the tree rows, from ``hidden`` [R, E]; or none, as requested."""
        if hidden is None or not wants_logits or not batch.trees:
            return StageOutput()
        rows = to_device(tree_row_index(row_items(batch)), hidden.device)
        with torch.inference_mode(), self._meter.model("exit"):
            return StageOutput(logits=self._output(self._norm(hidden[rows])))


class ExitStage(StageGroup):
    def __init__(self, *, body: ModelStage, heads: Mapping[int, NormHead | ModelStage]) -> None:
        """Combines layers ``body`` with exit heads. ``heads`` maps the number of target layers
        before an exit (PPSD's E), whose output ``body`` captures, to its head: a ``NormHead``, or a
        ``ModelStage`` of one decoder layer, with a block pool of its own if its cache is paged.
        """
        self.body = self.layers = body
        self._heads = dict(sorted(heads.items()))
        super().__init__((body, *self._heads.values()))

    @property
    def num_exits(self) -> int:
        return len(self._heads)

    def run(
        self, batch: Batch, hidden: torch.Tensor | None, *, wants_exits: bool = True
    ) -> StageOutput:
        out = self.body.run(batch, hidden)
        exits = {}
        for layer, head in self._heads.items():
            found = head.run(batch, out.captured[HiddenName(layer - 1)], wants_logits=wants_exits)
            if found.logits is not None:
                exits[layer] = found.logits
        return replace(out, exit_logits=exits)

    def cache(self, request_id: int) -> TreeCache:
        """Returns the cache of the layers, not of the heads."""
        return self.body.cache(request_id)
