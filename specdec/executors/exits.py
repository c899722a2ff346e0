"""Pipeline stages with exit heads (PPSD 4.1, B.3).

A head computes every row of its stage, prompts included, so the cache of a transformer head always
has the same entries as its stage's cache, and both apply the same commits.

Shape letters: R rows of a batch, W tree rows among them, E hidden size, V vocabulary, K candidates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from specdec.attention.tree_attention import TreeCache
from specdec.clocks.meter import Meter
from specdec.device import to_device
from specdec.executors.stage import (
    ModelStage,
    Stage,
    StageOutput,
    row_items,
    tree_row_index,
)
from specdec.types import Batch, Commit, HiddenName


class ExitHead:
    """Computes logits from hidden states after the exit layer. The base class has no cache."""

    def open(self, request_id: int, max_len: int) -> None:
        """Allocates the head's cache of a request."""

    def run(self, batch: Batch, hidden: torch.Tensor, *, wants_logits: bool) -> torch.Tensor | None:
        """Returns logits [W, V] in the order of ``batch.trees`` from packed hidden states [R, E].

        Without ``wants_logits`` it only updates its cache and returns None.
        """
        raise NotImplementedError

    def paged(self, num_blocks: int, block_tokens: int) -> ExitHead:
        """Returns the same head with its cache, if any, in a pool of blocks."""
        return self

    def commit(self, commits: Sequence[Commit]) -> None:
        """Applies commits to the cache."""

    def close(self, request_id: int) -> None:
        """Frees the request's cache."""


class NormHead(ExitHead):
    def __init__(self, *, norm: nn.Module, output: nn.Module, meter: Meter) -> None:
        """Wraps the modules; ``meter`` counts every pass under the name "exit"."""
        self._norm = norm
        self._output = output
        self._meter = meter

    def run(self, batch: Batch, hidden: torch.Tensor, *, wants_logits: bool) -> torch.Tensor | None:
        if not wants_logits or not batch.trees:
            return None
        rows = to_device(tree_row_index(row_items(batch)), hidden.device)
        with torch.inference_mode(), self._meter.model("exit"):
            logits: torch.Tensor = self._output(self._norm(hidden[rows]))
        return logits


class TransformerHead(ExitHead):
    """An exit head of one decoder layer with its own cache, a norm and an output matrix."""

    def __init__(self, *, stage: ModelStage) -> None:
        self._stage = stage
        self.open = stage.open  # type: ignore[method-assign]
        self.commit = stage.commit  # type: ignore[method-assign]
        self.close = stage.close  # type: ignore[method-assign]

    def run(self, batch: Batch, hidden: torch.Tensor, *, wants_logits: bool) -> torch.Tensor | None:
        return self._stage.run(batch, hidden, wants_logits=wants_logits).logits

    def paged(self, num_blocks: int, block_tokens: int) -> TransformerHead:
        """Uses a separate pool, since the number of layers differs from the stage's."""
        return TransformerHead(stage=self._stage.paged(num_blocks, block_tokens))


class ExitStage(Stage):
    def __init__(self, *, body: ModelStage, heads: Mapping[int, ExitHead]) -> None:
        """``heads`` maps the number of target layers before an exit (PPSD's E) to its head.

        ``body`` must capture the output of the layer before each exit.
        """
        self.body = self.layers = body
        self._heads = dict(sorted(heads.items()))
        self._parts: tuple[ModelStage | ExitHead, ...] = (body, *self._heads.values())

    def paged(self, num_blocks: int | None, block_tokens: int) -> ExitStage:
        if num_blocks is None:
            return self
        heads = {e: head.paged(num_blocks, block_tokens) for e, head in self._heads.items()}
        return ExitStage(body=self.body.paged(num_blocks, block_tokens), heads=heads)

    @property
    def num_exits(self) -> int:
        return len(self._heads)

    def open(self, request_id: int, max_len: int) -> None:
        for part in self._parts:
            part.open(request_id, max_len)

    def run(
        self, batch: Batch, hidden: torch.Tensor | None, *, wants_exits: bool = True
    ) -> StageOutput:
        out = self.body.run(batch, hidden)
        exits = {}
        for layer, head in self._heads.items():
            logits = head.run(batch, out.captured[HiddenName(layer - 1)], wants_logits=wants_exits)
            if logits is not None:
                exits[layer] = logits
        return replace(out, exit_logits=exits)

    def commit(self, commits: Sequence[Commit]) -> None:
        for part in self._parts:
            part.commit(commits)

    def close(self, request_id: int) -> None:
        for part in self._parts:
            part.close(request_id)

    def cache(self, request_id: int) -> TreeCache:
        """Returns the cache of the layers, not of the heads."""
        return self.body.cache(request_id)
