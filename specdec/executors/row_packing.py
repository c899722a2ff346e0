"""How the rows of a batch are packed in a forward, and how pruning shrinks them in flight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from specdec.device import to_device
from specdec.types import (
    Batch,
    BoolArray,
    Commit,
    IntArray,
    Output,
    PrefillChunk,
    PromptHidden,
    TreeRows,
)

_NO_TOKENS = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class RowItem:
    """One request's rows: its prefill chunk first, then its tree nodes."""

    request: int
    prefill: PrefillChunk | None
    tree: TreeRows | None

    @property
    def prefill_tokens(self) -> IntArray:
        """int64[T], empty without a chunk."""
        return _NO_TOKENS if self.prefill is None else self.prefill.tokens

    @property
    def num_rows(self) -> int:
        """Rows in the packed forward."""
        return len(self.prefill_tokens) + (0 if self.tree is None else len(self.tree.node_ids))


def row_items(batch: Batch) -> list[RowItem]:
    """The batch's rows by request, in packing order (the same on every stage)."""
    chunks = {chunk.request: chunk for chunk in batch.prefills}
    items = [RowItem(t.request, chunks.pop(t.request, None), t) for t in batch.trees]
    return items + [RowItem(chunk.request, chunk, None) for chunk in chunks.values()]


def tree_row_index(items: list[RowItem]) -> IntArray:
    """int64[W]: packed indices of the tree rows, in the order of ``batch.trees``."""
    parts, start = [], 0
    for item in items:
        stop = start + item.num_rows
        parts.append(np.arange(start + len(item.prefill_tokens), stop))
        start = stop
    return np.concatenate(parts) if parts else _NO_TOKENS


class Submitted:
    """The live nodes of every request that have entered the target.

    A commit keeps what is still in flight; what was answered is retired or pruned with it.
    """

    def __init__(self) -> None:
        self._ids: dict[int, list[IntArray]] = {}

    def open(self, request_id: int) -> None:
        """Starts a request."""
        self._ids[request_id] = []

    def add(self, batch: Batch) -> None:
        """Notes a batch that enters the target."""
        for rows in batch.trees:
            self._ids[rows.request].append(rows.node_ids)

    def commit(self, commit: Commit) -> int:
        """Follows a decision; returns how many nodes pruning looks at, the verified path apart."""
        parts = self._ids[commit.request]
        ids = np.concatenate(parts) if parts else _NO_TOKENS
        alive = ids[commit.keeps(ids)]
        self._ids[commit.request] = [alive]
        return len(ids) - len(commit.retired_ids)

    def close(self, request_id: int) -> None:
        """Forgets a request."""
        self._ids.pop(request_id, None)


@dataclass(slots=True)
class InFlight:
    """A batch between two stages.

    Attributes:
        batch: the rows that are still alive.
        hidden: [sum of rows, E] output of the stage that it left; None before the first stage and
            where stages compute nothing.
        captured: layer -> [sum of rows, E] after it, of layers on the stages behind.
    """

    batch: Batch
    hidden: torch.Tensor | None = None
    captured: dict[int, torch.Tensor] = field(default_factory=dict)

    def prune(self, commits: Mapping[int, Commit], closed: frozenset[int] = frozenset()) -> None:
        """Drops rows that a commit did not keep and all rows of closed requests.

        SpecPipe 3.3.2, second stage of a step: hidden states are pruned as the caches are.
        """
        items = row_items(self.batch)
        if not any(item.request in commits or item.request in closed for item in items):
            return
        keep = [_kept_rows(item, commits, closed) for item in items]
        trees = [
            item.tree.keep(mask[len(item.prefill_tokens) :])
            for item, mask in zip(items, keep, strict=True)
            if item.tree is not None
        ]
        if self.hidden is not None:
            mask = np.concatenate(keep) if keep else np.zeros(0, np.bool_)
            if not mask.all():
                # Places, not a mask: a device's tensors are asked how many places a mask has.
                rows = to_device(np.flatnonzero(mask), self.hidden.device)
                self.hidden = self.hidden[rows]
                self.captured = {layer: held[rows] for layer, held in self.captured.items()}
        self.batch = replace(
            self.batch,
            trees=tuple(tree for tree in trees if len(tree.node_ids)),
            prefills=tuple(c for c in self.batch.prefills if c.request not in closed),
        )


def _kept_rows(item: RowItem, commits: Mapping[int, Commit], closed: frozenset[int]) -> BoolArray:
    mask = np.ones(item.num_rows, np.bool_)
    if item.request in closed:
        mask[:] = False
    elif item.request in commits and item.tree is not None:
        commit = commits[item.request]
        mask[len(item.prefill_tokens) :] = commit.keeps(item.tree.node_ids)
    return mask


def with_hidden(output: Output, batch: Batch, captured: Mapping[int, torch.Tensor]) -> Output:
    """The output of a batch that has passed the target, with the hidden states of its rows.

    Args:
        output: one ``Answers`` per request with tree rows, in the order of ``batch.trees``.
        batch: what was answered.
        captured: layer -> [sum of rows, E] in packing order.
    """
    answers = {found.request: found for found in output.answers}
    prompts, start = [], 0
    for item in row_items(batch):
        middle, stop = start + len(item.prefill_tokens), start + item.num_rows
        if item.prefill is not None:
            layers = {layer: hidden[start:middle] for layer, hidden in captured.items()}
            prompts.append(
                PromptHidden(request=item.request, start=item.prefill.start, layers=layers)
            )
        if item.tree is not None:
            rows = {layer: hidden[middle:stop] for layer, hidden in captured.items()}
            answers[item.request] = replace(answers[item.request], hidden=rows)
        start = stop
    return replace(output, answers=tuple(answers.values()), prompts=tuple(prompts))
