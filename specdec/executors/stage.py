"""A pipeline stage: a slice of the target's layers with one cache per request.

Stages are dumb: they compute what a batch names and follow commits. The in-process pipeline calls
them directly; the distributed one runs the same objects behind messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch

from specdec.attention.kv_cache import TreeCache
from specdec.attention.kv_storage import BlockPool
from specdec.executors.row_packing import RowItem, row_items, tree_row_index
from specdec.models.runner import ModelRunner
from specdec.types import Batch, Commit, IntArray

_NONE = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOutput:
    """What a stage computed.

    Attributes:
        hidden: [rows, E] for the next stage; None where nothing is computed.
        logits: [tree rows, V] in the order of ``batch.trees``; last stage only.
        captured: layer (from 0) -> [rows, E] after it, of the layers that the stage was asked for.
        exit_logits: layers before an exit -> [tree rows, V] of its head, of the exits in the stage.
    """

    hidden: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    captured: Mapping[int, torch.Tensor] = field(default_factory=dict)
    exit_logits: Mapping[int, torch.Tensor] = field(default_factory=dict)


class Stage(Protocol):
    """A slice of the target."""

    def open(self, request_id: int, max_len: int) -> None:
        """Makes room for a request of at most ``max_len`` tokens."""
        ...

    def run(self, batch: Batch, hidden: torch.Tensor | None) -> StageOutput:
        """Computes the batch's rows; ``hidden`` is the input of a stage that is not the first."""
        ...

    def commit(self, commits: Sequence[Commit]) -> None:
        """Moves verified entries into the prefix, keeps surviving ones, drops the rest."""
        ...

    def close(self, request_id: int) -> None: ...


class ModelStage:
    """A slice of a Hugging Face model."""

    def __init__(self, *, runner: ModelRunner, pool: BlockPool | None = None) -> None:
        """Serves the layers of ``runner``; caches are blocks of ``pool`` where there is one."""
        self.runner = runner
        self.pool = pool
        self._caches: dict[int, TreeCache] = {}

    def open(self, request_id: int, max_len: int) -> None:
        """Allocates the request's cache; its tree region grows as needed."""
        make, pool = self.runner.new_cache, self.pool
        self._caches[request_id] = make(max_len) if pool is None else make(max_len, pool)

    def run(
        self, batch: Batch, hidden: torch.Tensor | None, *, wants_logits: bool = True
    ) -> StageOutput:
        """One packed forward over the batch's rows; logits where the stage has them."""
        items = row_items(batch)
        rows = [self._rows(item) for item in items]
        wanted = tree_row_index(items) if self.runner.is_last and wants_logits else _NONE
        out = self.runner.forward(rows, hidden=hidden, logits_rows=wanted)
        return StageOutput(hidden=out.hidden, logits=out.logits, captured=out.captured)

    def commit(self, commits: Sequence[Commit]) -> None:
        """Applies commits to the caches of requests that this stage serves."""
        for commit in commits:
            self._caches[commit.request].commit(commit)

    def close(self, request_id: int) -> None:
        """Frees the request's cache."""
        cache = self._caches.pop(request_id, None)
        if cache is not None:
            cache.close()

    def paged(self, num_blocks: int, block_tokens: int) -> ModelStage:
        """The same layers, the caches of all their requests in one pool of blocks."""
        spec = self.runner.spec
        pool = BlockPool(spec=spec, num_blocks=num_blocks, block_tokens=block_tokens)
        return ModelStage(runner=self.runner, pool=pool)

    def cache(self, request_id: int) -> TreeCache:
        """The request's cache (for checks of its invariant)."""
        return self._caches[request_id]

    def _rows(self, item: RowItem):  # type: ignore[no-untyped-def]
        tree = item.tree
        return self._caches[item.request].rows(
            prefix_tokens=item.prefill_tokens,
            node_ids=_NONE if tree is None else tree.node_ids,
            node_tokens=_NONE if tree is None else tree.tokens,
            parent_ids=_NONE if tree is None else tree.parent_ids,
            node_positions=_NONE if tree is None else tree.positions,
        )


class NullStage:
    """A stage that computes nothing: synthetic targets, and the cost of the schedule itself."""

    def open(self, request_id: int, max_len: int) -> None:
        """Nothing to hold."""

    def run(self, batch: Batch, hidden: torch.Tensor | None) -> StageOutput:
        """Nothing to compute."""
        return StageOutput()

    def commit(self, commits: Sequence[Commit]) -> None:
        """Nothing to prune."""

    def close(self, request_id: int) -> None:
        """Nothing to free."""


def split_layers(
    num_layers: int, num_stages: int, *, head_layers: float = 0.0
) -> list[tuple[int, int]]:
    """(first, last) layer of each stage, as even as possible, the shorter stages last.

    The last stage also carries the output head, so it gets the smaller share (the papers put two
    layers fewer beside it).

    Args:
        num_layers: of the target.
        num_stages: at most as many.
        head_layers: what the output head costs, in layers; an embedding lookup costs nothing. The
            slowest stage, which sets the pace, is as fast as it can be.

    Raises:
        ValueError: if there are more stages than layers.
    """
    if not 1 <= num_stages <= num_layers:
        raise ValueError(
            f"executor.stages={num_stages} does not fit a target of {num_layers} layers;"
            f" choose 1 to {num_layers}"
        )
    sizes = [1] * num_stages
    costs = [1.0] * (num_stages - 1) + [1.0 + head_layers]
    for _ in range(num_layers - num_stages):
        cheapest = costs.index(min(costs))
        sizes[cheapest] += 1
        costs[cheapest] += 1.0
    bounds: IntArray = np.cumsum([0, *sizes])
    return [(int(a), int(b)) for a, b in pairwise(bounds)]
