"""Packing of a batch's rows for a forward, and pruning of rows in flight between stages.

Shape letters: R rows of a batch, W tree rows, T prompt tokens, E hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import TypeAlias

import numpy as np
import torch

from specdec.device import to_device
from specdec.types import (
    Batch,
    Commit,
    CommitKind,
    EarlyHidden,
    HiddenName,
    IntArray,
    Output,
    PrefillChunk,
    PromptHidden,
    TreeRows,
)

_NO_TOKENS = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class RowItem:
    """The rows of one request: its prefill chunk first, then its tree nodes."""

    request: int
    prefill: PrefillChunk | None
    tree: TreeRows | None

    @property
    def prefill_tokens(self) -> IntArray:
        """int64[T], empty without a chunk."""
        return _NO_TOKENS if self.prefill is None else self.prefill.tokens

    @property
    def num_rows(self) -> int:
        """Number of rows in the packed forward."""
        return len(self.prefill_tokens) + (0 if self.tree is None else len(self.tree.node_ids))


def row_items(batch: Batch) -> list[RowItem]:
    """The batch's rows by request, in packing order, which is the same on every stage."""
    if not batch.prefills:
        return [RowItem(tree.request, None, tree) for tree in batch.trees]
    chunks = {chunk.request: chunk for chunk in batch.prefills}
    items = [RowItem(t.request, chunks.pop(t.request, None), t) for t in batch.trees]
    return items + [RowItem(chunk.request, chunk, None) for chunk in chunks.values()]


def tree_row_index(items: list[RowItem]) -> IntArray:
    """int64[W]: packed indices of the tree rows, in the order of ``batch.trees``."""
    if all(item.prefill is None for item in items):
        return np.arange(sum([item.num_rows for item in items]))
    parts, start = [], 0
    for item in items:
        stop = start + item.num_rows
        parts.append(np.arange(start + len(item.prefill_tokens), stop))
        start = stop
    return np.concatenate(parts) if parts else _NO_TOKENS


def with_hidden(
    output: Output, batch: Batch, captured: Mapping[HiddenName, torch.Tensor]
) -> Output:
    """Adds the hidden states of a batch that has passed the target to its output.

    Args:
        output: one ``Answers`` per request with tree rows, in the order of ``batch.trees``.
        batch: the answered batch.
        captured: name -> [R, E], in packing order.
    """
    answers = {answer.request: answer for answer in output.answers}
    prompts, trees = _by_item(batch, captured)
    for rows, hidden in trees:
        answers[rows.request] = replace(answers[rows.request], hidden=hidden)
    return replace(output, answers=tuple(answers.values()), prompts=(*output.prompts, *prompts))


def with_early(output: Output, batch: Batch, captured: Mapping[HiddenName, torch.Tensor]) -> Output:
    """Adds the hidden states of a batch that has passed some layers; arguments as above."""
    if not captured:
        return output
    prompts, trees = _by_item(batch, captured)
    early = tuple(
        EarlyHidden(request=rows.request, node_ids=rows.node_ids, hidden=hidden)
        for rows, hidden in trees
    )
    return replace(output, early=output.early + early, prompts=(*output.prompts, *prompts))


_Hidden: TypeAlias = dict[HiddenName, torch.Tensor]


def _by_item(
    batch: Batch, captured: Mapping[HiddenName, torch.Tensor]
) -> tuple[list[PromptHidden], list[tuple[TreeRows, _Hidden]]]:
    """The states of each prefill chunk, and of each request's tree rows."""
    prompts, trees, start = [], [], 0
    for item in row_items(batch):
        middle, stop = start + len(item.prefill_tokens), start + item.num_rows
        if (chunk := item.prefill) is not None:
            states = {name: rows[start:middle] for name, rows in captured.items()}
            prompts.append(PromptHidden(request=chunk.request, start=chunk.start, hidden=states))
        if item.tree is not None:
            states = {name: rows[middle:stop] for name, rows in captured.items()}
            trees.append((item.tree, states))
        start = stop
    return prompts, trees


@dataclass(slots=True)
class _Entered:
    """One request's live nodes in the target.

    Attributes:
        ids: their ids in the order of entry, in parts that are concatenated by the next commit.
        nodes, prompt: tick of entry -> number of nodes, and of prompt rows.
    """

    ids: list[IntArray] = field(default_factory=list)
    nodes: dict[int, int] = field(default_factory=dict)
    prompt: dict[int, int] = field(default_factory=dict)


class Submitted:
    """Ids of the live nodes that have entered the target, by request."""

    def __init__(self, *, by_tick: bool = False) -> None:
        """Starts without requests; ``by_tick``: whether ``num_rows`` will be asked for."""
        self._by_tick = by_tick
        self._entered: dict[int, _Entered] = {}

    def open(self, request_id: int) -> None:
        """Starts a request."""
        self._entered[request_id] = _Entered()

    def add(self, batch: Batch, tick: int = 0) -> None:
        """Adds the rows of a submitted batch; ``tick``: of its entry."""
        for rows in batch.trees:
            entered = self._entered[rows.request]
            entered.ids.append(rows.node_ids)
            if self._by_tick:
                entered.nodes[tick] = len(rows.node_ids)
        if self._by_tick:
            for chunk in batch.prefills:
                self._entered[chunk.request].prompt[tick] = len(chunk.tokens)

    def commit(self, commit: Commit) -> int:
        """Drops retired and pruned nodes, and all rows of a finished request.

        Returns:
            The number of nodes that the pruning examines: all live ones but the verified path.
        """
        entered = self._entered[commit.request]
        ids = np.concatenate(entered.ids) if entered.ids else _NO_TOKENS
        kept = commit.keeps(ids).nonzero()[0]
        if self._by_tick:
            entered.prompt = {}  # it has passed the target, as the root has
            entered.nodes = _counted(entered.nodes, kept)
        if commit.finished:
            kept, entered.nodes = kept[:0], {}
        entered.ids = [ids.take(kept)]
        return len(ids) - len(commit.retired_ids)

    def num_rows(self, ticks: Sequence[int]) -> list[int]:
        """Number of live rows of each of the batches that entered at ``ticks``."""
        every = self._entered.values()
        totals = [sum([entered.nodes.get(tick, 0) for entered in every]) for tick in ticks]
        if any(entered.prompt for entered in every):
            for place, tick in enumerate(ticks):
                totals[place] += sum([entered.prompt.get(tick, 0) for entered in every])
        return totals

    def close(self, request_id: int) -> None:
        """Drops the request."""
        self._entered.pop(request_id, None)


def _counted(nodes: Mapping[int, int], kept: IntArray) -> dict[int, int]:
    """Tick -> number of its kept nodes, if any.

    Args:
        nodes: tick -> number of its nodes.
        kept: int64[M], sorted places of the kept ones among all, counted from tick to tick.
    """
    stops = kept.searchsorted(list(accumulate(nodes.values()))).tolist()
    counts = zip(nodes, pairwise([0, *stops]), strict=True)
    return {tick: after - before for tick, (before, after) in counts if after > before}


@dataclass(slots=True)
class InFlight:
    """A batch between two stages.

    Attributes:
        batch: the rows that are not pruned.
        hidden: [R, E], output of the stage that it left; None before the first stage and for stages
            without a model.
        captured: name -> [R, E], hidden states captured by the stages that it has passed.
    """

    batch: Batch
    hidden: torch.Tensor | None = None
    captured: dict[HiddenName, torch.Tensor] = field(default_factory=dict)

    def prune(self, commits: Mapping[int, Commit], closed: frozenset[int] = frozenset()) -> None:
        """Drops rows of nodes that a commit did not keep, and all rows of closed requests.

        SpecPipe 3.3.2, second phase of a step: hidden states are pruned like the caches.
        """
        batch = self.batch
        trees = [(rows, _kept_of(rows, commits, closed)) for rows in batch.trees]
        prefills = batch.prefills
        if closed:
            prefills = tuple(chunk for chunk in prefills if chunk.request not in closed)
        if len(prefills) == len(batch.prefills) and all(kept is None for _, kept in trees):
            return
        if self.hidden is not None:
            places = {rows.request: kept for rows, kept in trees if kept is not None}
            index = _kept_rows(row_items(batch), places, closed)
            # Indices instead of a mask: indexing by a device mask synchronizes with the device.
            rows = to_device(index, self.hidden.device)
            self.hidden = self.hidden[rows]
            self.captured = {name: states[rows] for name, states in self.captured.items()}
        left = [
            rows if kept is None else rows.take(kept)
            for rows, kept in trees
            if kept is None or len(kept)
        ]
        self.batch = Batch(step=batch.step, trees=tuple(left), prefills=prefills)


def kept_places(rows: TreeRows, commit: Commit) -> IntArray | None:
    """int64[K], sorted: the rows of a request that survive a commit; None: all of them."""
    if commit.kind is CommitKind.MISS:  # the new root is not in the target yet
        return _NO_TOKENS
    kept = commit.keeps(rows.node_ids).nonzero()[0]
    return None if len(kept) == len(rows.node_ids) else kept


def _kept_of(
    rows: TreeRows, commits: Mapping[int, Commit], closed: frozenset[int]
) -> IntArray | None:
    """As ``kept_places``, with the request's commit if it has one; none of a closed request."""
    if rows.request in closed:
        return _NO_TOKENS
    commit = commits.get(rows.request)
    return None if commit is None else kept_places(rows, commit)


def _kept_rows(
    items: list[RowItem], places: Mapping[int, IntArray], closed: frozenset[int]
) -> IntArray:
    """int64[rows]: packed indices; prompt rows are kept unless the request is closed."""
    parts, start = [_NO_TOKENS], 0
    for item in items:
        middle, stop = start + len(item.prefill_tokens), start + item.num_rows
        if item.request not in closed:
            kept = places.get(item.request)
            parts.append(np.arange(start, middle))
            parts.append(np.arange(middle, stop) if kept is None else middle + kept)
        start = stop
    return np.concatenate(parts)
