"""Attention whose result for a row does not depend on other rows of a pass (``model.exact=true``).

A row's keys are taken in the order of their positions (the prefix, then the tree's part of its
path) and cut into blocks at multiples of ``BLOCK`` positions. Products over a block have the same
shapes in every pass, and blocks are added in the order of their positions. So the result depends
neither on the slots that keys occupy, nor on entries that the row does not see, nor on the other
rows, the cut of the prompt into chunks, or the storage of the cache. Keys past a row's position
have weight 0, which adds nothing.

All products are batched matrix products in float32 (float64 for float64 models) with a number of
rows from a fixed set; ``specdec.models.backends.exact`` tests on the device that a row gets the
same bits for each number in the set.

Shape letters: H query heads, G key/value heads, P = H / G, D head size, R rows of one request, n
used slots, B block, N blocks, U 1 or R (sets of keys), M padded query rows of one set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec.attention.tree_attention import PassPlan, Rows, ScoreOptions, Store
from specdec.device import to_device

BLOCK = 64

_ONES = 8  # columns of ones beside the values, whose products are the sums of the weights
_LEAST_ROWS = 8  # query rows of the smallest product
_PIECE = 32768  # elements: torch's grain size, which it computes on one thread
_REGISTERS = 64  # elements: two 512-bit registers of 16-bit numbers


@dataclass(slots=True)
class Context:
    """Slots of the keys that each row of one request attends to, in the order of positions."""

    positions: Tensor  # int64[R], absolute positions of the rows
    # number of leading blocks in which the key of position ``p`` is in slot ``p`` for every row
    # that sees it
    num_blocks: int
    num_slots: int  # leading slots that these blocks read; the rest of the last block is padding
    # int64[R, N * B], slots of the positions from ``num_blocks`` * B on, 0 where a row has no key;
    # None if no row has keys there
    slots: Tensor | None = None
    _masks: dict[tuple[bool, int | None], Tensor | None] = field(default_factory=dict)

    def mask(self, *, own: bool, window: int | None) -> Tensor | None:
        """Returns a bool mask, true at keys that are later than a row or out of its sliding window
        of ``window`` positions (None: no window); None if there are no such keys. It covers keys in
        ``slots`` if ``own``, else the leading blocks, and broadcasts with [G, U, N, R / U, P, B].
        """
        key = (own, window)
        if key not in self._masks:
            start = self.num_blocks * BLOCK if own else 0
            num_keys = self.num_blocks * BLOCK
            if own:
                assert self.slots is not None, "rows without slots cannot gather their keys"
                num_keys = self.slots.shape[1]
            keys = torch.arange(start, start + num_keys, device=self.positions.device)
            hidden = keys > self.positions[:, None]
            if window is not None:
                hidden |= keys <= self.positions[:, None] - window
            num_sets = len(self.positions) if own else 1
            by_block = hidden.view(num_sets, -1, num_keys // BLOCK, BLOCK).transpose(1, 2)
            self._masks[key] = by_block[None, :, :, :, None] if hidden.any() else None
        return self._masks[key]


def context_of(rows: Rows) -> Context:
    positions, device = rows.positions, rows.cache.spec.device
    on_device = to_device(positions, device)
    # Each slot below ``border`` is the position of its key, and is written before attention runs.
    border = rows.start + rows.num_prefix if rows.num_prefix else rows.first_masked
    end = int(positions.max()) + 1
    num_blocks = -(-end // BLOCK)
    if rows.num_prefix == len(rows):
        return Context(on_device, num_blocks, end)
    row, column = np.nonzero(rows.visible[:, border - rows.first_masked :])
    slot = border + column
    position = rows.cache.key_positions(rows.end)[slot]
    if np.array_equal(slot, position):  # a chain in the order of its slots
        return Context(on_device, num_blocks, end)
    num_full = border // BLOCK
    start = num_full * BLOCK
    slots = np.zeros((len(rows), num_blocks * BLOCK - start), np.int64)
    slots[:, : border - start] = np.arange(start, border)
    slots[row, position - start] = slot
    return Context(on_device, num_full, start, to_device(slots, device))


class ExactPlan(PassPlan):
    def __init__(
        self,
        *,
        parts: Sequence[Rows],
        num_rows: int,
        first_layer: int,
        hidden: Tensor | None = None,
    ) -> None:
        super().__init__(first_layer=first_layer, hidden=hidden)
        self._num_rows = num_rows
        self._parts: list[tuple[slice, Store, Context]] = []
        offset = 0
        for part in parts:
            store = part.cache.slot_writer(part.start, part.end)
            columns = slice(offset, offset + len(part))
            self._parts.append((columns, store, context_of(part)))
            offset += len(part)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: ScoreOptions) -> Tensor:
        layer = self.cache.layer
        output = query.new_zeros(1, self._num_rows, query.shape[1], query.shape[3])
        for columns, store, context in self._parts:
            keys, values = store(layer, key[:, :, columns], value[:, :, columns])
            own = query[0, :, columns]
            output[0, columns] = exact_attention(own, keys[0], values[0], context, options)
        return output


def exact_attention(
    query: Tensor, key: Tensor, value: Tensor, context: Context, options: ScoreOptions
) -> Tensor:
    """Computes attention [R, H, D] for query [H, R, D] over keys, values [G, n, D] of all slots."""
    (heads, num_rows, size), groups = query.shape, len(key)
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    scale = size**-0.5 if options.scaling is None else options.scaling
    query = (query.to(dtype) * scale).view(groups, -1, num_rows, size).transpose(1, 2)
    sets = []
    for own, keys, values in _key_sets(key, value, context, dtype):
        part = _KeySet.of(query, keys, values, options.softcap)
        hidden = context.mask(own=own, window=options.window)
        if hidden is not None:
            part.rows.masked_fill_(hidden, -torch.inf)
        sets.append(part)
    top = sets[0].best()
    for part in sets[1:]:
        top = torch.maximum(top, part.best())
    total: Tensor | None = None
    for part in sets:
        for block in part.weighted(top):
            total = block if total is None else total + block
    assert total is not None, "a row sees itself"
    output = total[..., :size] / total[..., size : size + 1]  # [G, R, P, D]
    return output.transpose(0, 1).reshape(num_rows, heads, size).to(value.dtype)


def _key_sets(
    key: Tensor, value: Tensor, context: Context, dtype: torch.dtype
) -> Iterator[tuple[bool, Tensor, Tensor]]:
    """Yields (own, keys [G, U, N, B, D], values [G, U, N, B, D + ``_ONES``]) for the blocks that
    all rows share (own is False, U = 1), then for each row's own keys (True, U = R), if any.
    """
    if context.num_blocks:
        num_slots, width = context.num_slots, context.num_blocks * BLOCK
        leading = key[:, :num_slots], value[:, :num_slots]
        yield False, *_blocks(*leading, (1, context.num_blocks), width - num_slots, dtype)
    if context.slots is not None:
        index, num_blocks = context.slots.flatten(), context.slots.shape[1] // BLOCK
        own = key.index_select(1, index), value.index_select(1, index)
        yield True, *_blocks(*own, (len(context.slots), num_blocks), 0, dtype)


def _blocks(
    key: Tensor, value: Tensor, shape: tuple[int, int], padding: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    groups, used, size = key.shape
    extended = value.new_ones((groups, used + padding, size + _ONES), dtype=dtype)
    extended[:, :used, :size] = value
    extended[:, used:, :size] = 0.0
    if padding:
        keys = key.new_zeros((groups, used + padding, size), dtype=dtype)
        keys[:, :used] = key
    else:
        keys = key.to(dtype)
    sizes = (*shape, BLOCK)
    return keys.unflatten(1, sizes), extended.unflatten(1, sizes)


@dataclass(slots=True)
class _KeySet:
    scores: Tensor  # [G, U, N, M, B]; rows of padding have zeros
    rows: Tensor  # [G, U, N, R / U, P, B], a view of ``scores`` without the padding
    values: Tensor  # [G, U, N, B, D + ones]

    @staticmethod
    def of(query: Tensor, keys: Tensor, values: Tensor, softcap: float | None) -> _KeySet:
        """Computes scores of a scaled ``query`` [G, R, P, D] with ``keys`` [G, U, N, B, D]."""
        groups, num_rows, per_group, size = query.shape
        num_sets, num_blocks = keys.shape[1:3]
        used = num_rows // num_sets * per_group
        own = query.reshape(groups, num_sets, 1, used, size)
        if padded_rows(used) > used:
            own = pad(own, (0, 0, 0, padded_rows(used) - used))
        own = own.expand(-1, -1, num_blocks, -1, -1)
        products = torch.bmm(own.reshape(-1, *own.shape[3:]), keys.flatten(0, 2).transpose(1, 2))
        if softcap is not None:
            products = in_pieces(torch.tanh, products.div_(softcap)).mul_(softcap)
        scores = products.view(groups, num_sets, num_blocks, -1, BLOCK)
        rows = scores[:, :, :, :used].unflatten(3, (-1, per_group))
        return _KeySet(scores, rows, values)

    def best(self) -> Tensor:
        return self.rows.amax(-1).amax(2).flatten(1, 2)  # two steps: faster than both at once

    def weighted(self, top: Tensor) -> Iterator[Tensor]:
        """Yields, for each block of keys, the sums of weighted values and of weights in one tensor
        [G, R, P, D + ``_ONES``]. Subtracts the largest scores ``top`` [G, R, P] in place first.
        """
        groups, num_sets, _, num_rows, per_group, _ = self.rows.shape
        self.rows.sub_(top.view(groups, num_sets, 1, num_rows, per_group, 1))
        weights = in_pieces(torch.exp, self.scores.flatten(0, 2))
        products = torch.bmm(weights, self.values.flatten(0, 2))
        sums = products.view(*self.scores.shape[:4], -1)[:, :, :, : num_rows * per_group]
        for block in sums.unflatten(3, (num_rows, per_group)).unbind(2):
            yield block.flatten(1, 2)


def padded_rows(num: int) -> int:
    """Rounds ``num`` query rows of a product up to a power of two, at least 8."""
    return max(_LEAST_ROWS, 1 << (num - 1).bit_length())


def in_pieces(function: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """Applies an elementwise function so that a result's bits do not depend on the index.

    On a CPU torch computes exp, tanh and the like in vector registers, but what is left over at the
    end of a tensor, or of a thread's share, by scalar functions, whose last bit may differ. Pieces
    fill whole registers and run on one thread.
    """
    if tensor.is_cuda:
        return function(tensor)
    size = tensor.numel()
    flat = tensor.reshape(-1)
    if size % _REGISTERS:
        flat = pad(flat, (0, -size % _REGISTERS))
    pieces = [function(piece) for piece in flat.split(_PIECE)]
    whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return whole[:size].view(tensor.shape)


def row_ranges(rows: Sequence[Rows], size: int) -> Iterator[list[Rows]]:
    """Yields packed rows in parts (lists of ``Rows``) of ``size`` rows; the last may be smaller."""
    current: list[Rows] = []
    room = size
    for part in rows:
        start = 0
        while start < len(part):
            stop = min(start + room, len(part))
            current.append(part.cut(start, stop))
            start, room = stop, room - (stop - start)
            if not room:
                yield current
                current, room = [], size
    if current:
        yield current
