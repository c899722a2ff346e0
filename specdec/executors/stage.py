"""A pipeline stage: a slice of the target's layers with one cache per request.

A stage computes the rows of a batch and applies commits; decisions are made by the controller. The
in-process pipeline calls stages directly, the distributed one runs the same objects behind
messages.

Shape letters: R rows of a batch, W tree rows, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch

from specdec.attention.kv_cache import Rows, TreeCache
from specdec.attention.kv_storage import BlockPool
from specdec.executors.row_packing import row_items, tree_row_index
from specdec.models.runner import ModelRunner
from specdec.types import Batch, Commit, HiddenName, IntArray, TreeRows

_NONE = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOutput:
    """Results of a stage.

    Attributes:
        hidden: [R, E], input of the next stage; None for a stage without a model.
        logits: [W, V] in the order of ``batch.trees``; last stage only.
        captured: name -> [R, E], the hidden states that the stage captures.
        exit_logits: number of layers before an exit -> [W, V] of its head, for the stage's exits.
    """

    hidden: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    captured: Mapping[HiddenName, torch.Tensor] = field(default_factory=dict)
    exit_logits: Mapping[int, torch.Tensor] = field(default_factory=dict)


class Stage(Protocol):
    """A slice of the target."""

    def open(self, request_id: int, max_len: int) -> None:
        """Allocates the cache of a request of at most ``max_len`` entries, nodes included."""
        ...

    def run(self, batch: Batch, hidden: torch.Tensor | None) -> StageOutput:
        """Computes the batch's rows; ``hidden``: [R, E] of the stage before, None for the first."""
        ...

    def commit(self, commits: Sequence[Commit]) -> None:
        """Moves retired cache entries into the prefix, keeps surviving ones, drops the rest."""
        ...

    def close(self, request_id: int) -> None: ...


class ModelStage:
    """A slice of a Hugging Face model."""

    def __init__(self, *, runner: ModelRunner, pool: BlockPool | None = None) -> None:
        """Wraps the layers of ``runner``; with ``pool`` the caches are paged."""
        self.runner = runner
        self.pool = pool
        self._caches: dict[int, TreeCache] = {}

    def open(self, request_id: int, max_len: int) -> None:
        """Allocates the request's cache, which grows if it needs more."""
        make, pool = self.runner.new_cache, self.pool
        self._caches[request_id] = make(max_len) if pool is None else make(max_len, pool)

    def run(
        self, batch: Batch, hidden: torch.Tensor | None, *, wants_logits: bool = True
    ) -> StageOutput:
        """One packed forward over the batch's rows; logits where the stage has them."""
        wants_logits = wants_logits and self.runner.is_last
        logits_rows: IntArray | None = _NONE
        if batch.prefills:
            items = row_items(batch)
            rows = [self._rows(item.request, item.prefill_tokens, item.tree) for item in items]
            if wants_logits:
                logits_rows = tree_row_index(items)
        else:
            rows = [self._rows(tree.request, _NONE, tree) for tree in batch.trees]
            if wants_logits and rows:
                logits_rows = None  # of every row
        out = self.runner.forward(rows, hidden=hidden, logits_rows=logits_rows)
        return StageOutput(hidden=out.hidden, logits=out.logits, captured=out.captured)

    def commit(self, commits: Sequence[Commit]) -> None:
        """Applies commits to the caches."""
        for commit in commits:
            self._caches[commit.request].commit(commit)

    def close(self, request_id: int) -> None:
        """Frees the request's cache."""
        cache = self._caches.pop(request_id, None)
        if cache is not None:
            cache.close()

    def paged(self, num_blocks: int, block_tokens: int) -> ModelStage:
        """The same layers with all caches in one pool of blocks."""
        spec = self.runner.spec
        pool = BlockPool(spec=spec, num_blocks=num_blocks, block_tokens=block_tokens)
        return ModelStage(runner=self.runner, pool=pool)

    def cache(self, request_id: int) -> TreeCache:
        """The request's cache (for checks of its invariant)."""
        return self._caches[request_id]

    def _rows(self, request_id: int, prefill_tokens: IntArray, tree: TreeRows | None) -> Rows:
        return self._caches[request_id].rows(prefix_tokens=prefill_tokens, tree=tree)


_EMPTY = StageOutput()


class NullStage:
    """A stage without a model, for synthetic targets and for measuring the schedule's own cost."""

    def open(self, request_id: int, max_len: int) -> None:
        """No-op."""

    def run(self, batch: Batch, hidden: torch.Tensor | None) -> StageOutput:
        """Returns an empty output."""
        return _EMPTY

    def commit(self, commits: Sequence[Commit]) -> None:
        """No-op."""

    def close(self, request_id: int) -> None:
        """No-op."""


def split_layers(
    num_layers: int, num_stages: int, *, head_layers: float = 0.0
) -> list[tuple[int, int]]:
    """(start, end) layer of each stage, end exclusive, as even as possible, shorter stages last.

    The last stage also computes the output head, so it gets fewer layers (two fewer in the papers).

    Args:
        num_layers: number of layers of the target.
        num_stages: number of stages, at most ``num_layers``.
        head_layers: cost of the output head in layers; the split minimizes the cost of the slowest
            stage. Default: 0.

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
