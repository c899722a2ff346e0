"""Attention whose bits for a row do not depend on the pass: ``model.exact=true``.

A row's keys are taken in the order of their positions (the prefix, then the tree's part of its
path) and cut into blocks at multiples of ``BLOCK`` positions. Products over a block have the same
shapes in every pass, and blocks are added in the order of their positions. So the result depends
neither on the slots that keys occupy, nor on entries that the row does not see, nor on the other
rows, the cut of the prompt into chunks, or the storage of the cache. Keys past a row's position
have weight 0, which adds nothing.

All products are batched matrix products in float32 (float64 for float64 models) with a number of
rows from a fixed set; that they give a row the same bits in every one of them is proved for the
device by ``specdec.models.exact``.

Shape letters: H query heads, G key/value heads, P = H / G, D head size, R rows of one request, n
used slots, B block, N blocks, U 1 or R (sets of keys), M padded query rows of one set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec.attention.kv_cache import Rows
from specdec.attention.kv_storage import Store
from specdec.attention.tree_attention import ScoreOptions, Step
from specdec.device import to_device
from specdec.types import IntArray

BLOCK = 128
"""Positions per block of the sum over the context."""

_ONES = 8  # columns of ones beside the values, whose products are the sums of the weights
_LEAST_ROWS = 8  # query rows of the smallest product
_PIECE = 32768  # elements: torch's grain size, which it computes on one thread
_REGISTERS = 64  # elements: two registers of 512 bits, of 16-bit numbers


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows ``start`` .. ``stop`` - 1 of a request's rows in a pass."""

    rows: Rows
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Context:
    """The keys that the rows of one request see, by position.

    Attributes:
        positions: int64[R], absolute positions of the rows.
        num_blocks: leading blocks whose position ``p`` is in slot ``p`` for every row.
        slots: int64[U, N * B], slots of the positions from ``num_blocks`` * B on; U is 1 where all
            rows share them. 0 where a row has no key.
    """

    positions: Tensor
    num_blocks: int
    slots: Tensor


def context_of(part: RowRange, device: torch.device) -> Context:
    """The context of a range of rows, with tensors on ``device``."""
    rows = part.rows
    positions = rows.positions[part.start : part.stop]
    border = rows.start + rows.num_prefix if rows.num_prefix else rows.first_masked
    border = min(border, rows.start + part.stop)  # slots of positions, written by now
    num_blocks = border // BLOCK
    start = num_blocks * BLOCK
    width = -(-(int(positions.max()) + 1 - start) // BLOCK) * BLOCK
    shared = np.zeros((1, width), np.int64)
    shared[0, : border - start] = np.arange(start, border)
    slots = shared
    if part.stop > rows.num_prefix:
        slots = shared.repeat(len(part), 0)
        seen = rows.visible[part.start : part.stop, border - rows.first_masked :]
        row, column = np.nonzero(seen)
        slot = border + column
        slots[row, rows.cache.key_positions(rows.end)[slot] - start] = slot
    return Context(to_device(positions, device), num_blocks, to_device(slots, device))


class ExactStep(Step):
    """The plan of one pass: ranges of rows, then rows of padding up to ``num_rows``."""

    def __init__(
        self,
        *,
        parts: Sequence[RowRange],
        num_rows: int,
        first_layer: int,
        hidden: Tensor | None = None,
    ) -> None:
        """Prepares the contexts of all layers.

        Args:
            parts: in packing order.
            num_rows: of the padded pass.
            first_layer: see ``Step``.
            hidden: [1, num_rows, E] for a slice that is not the first; else None.
        """
        super().__init__(first_layer=first_layer, hidden=hidden)
        self._num_rows = num_rows
        self._parts: list[tuple[slice, Store, Context]] = []
        offset = 0
        for part in parts:
            cache, first = part.rows.cache, part.rows.start
            store = cache.slot_writer(first + part.start, first + part.stop)
            columns = slice(offset, offset + len(part))
            self._parts.append((columns, store, context_of(part, cache.spec.device)))
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
    """Attention of one request's rows, [R, H, D].

    Args:
        query: [H, R, D].
        key, value: [G, n, D], by slots.
        context: which slots the rows see.
        options: scaling, window and soft cap.
    """
    (heads, num_rows, size), groups = query.shape, len(key)
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    scale = size**-0.5 if options.scaling is None else options.scaling
    query = (query.to(dtype) * scale).view(groups, -1, num_rows, size).transpose(1, 2)
    sets = [
        _KeySet.of(query, keys, values, options.softcap)
        for keys, values in _key_sets(key, value, context, dtype)
    ]
    start, top = 0, None
    for part in sets:
        part.hide(context.positions, start, options.window)
        start += part.num_blocks * BLOCK
        best = part.best()
        top = best if top is None else torch.maximum(top, best)
    assert top is not None, "a row sees itself"
    total: Tensor | None = None
    for part in sets:
        for block in part.weighted(top):
            total = block if total is None else total + block
    assert total is not None, "a row sees itself"
    output = total[..., :size] / total[..., size : size + 1]  # [G, R, P, D]
    return output.transpose(0, 1).reshape(num_rows, heads, size).to(value.dtype)


def _key_sets(
    key: Tensor, value: Tensor, context: Context, dtype: torch.dtype
) -> Iterator[tuple[Tensor, Tensor]]:
    """Keys [G, U, N, B, D] and values [G, U, N, B, D + ones], in the order of positions."""
    groups, _, size = key.shape
    num_full = context.num_blocks * BLOCK
    if num_full:
        shape = (groups, 1, context.num_blocks, BLOCK, size)
        full = key[:, :num_full].to(dtype).reshape(shape)
        yield full, _with_ones(value[:, :num_full].unflatten(1, shape[1:4]), dtype)
    num_sets, width = context.slots.shape
    if width:
        shape = (groups, num_sets, width // BLOCK, BLOCK, size)
        index = context.slots.flatten()
        rest = key.index_select(1, index).to(dtype).view(shape)
        yield rest, _with_ones(value.index_select(1, index).view(shape), dtype)


def _with_ones(value: Tensor, dtype: torch.dtype) -> Tensor:
    size = value.shape[-1]
    extended = value.new_ones((*value.shape[:-1], size + _ONES), dtype=dtype)
    extended[..., :size] = value
    return extended


@dataclass(slots=True)
class _KeySet:
    """Scores of all rows over some blocks.

    Attributes:
        scores: [G, U, N, M, B]; rows of padding have zeros.
        rows: [G, U, N, R / U, P, B], the same memory without the padding.
        values: [G, U, N, B, D + ones].
    """

    scores: Tensor
    rows: Tensor
    values: Tensor

    @staticmethod
    def of(query: Tensor, keys: Tensor, values: Tensor, softcap: float | None) -> _KeySet:
        """Products of the scaled ``query`` [G, R, P, D] and ``keys`` [G, U, N, B, D]."""
        groups, num_rows, per_group, size = query.shape
        num_sets, num_blocks = keys.shape[1:3]
        used = num_rows // num_sets * per_group
        own = query.reshape(groups, num_sets, 1, used, size)
        own = pad(own, (0, 0, 0, padded_rows(used) - used))
        own = own.expand(-1, -1, num_blocks, -1, -1)
        products = torch.bmm(own.reshape(-1, *own.shape[3:]), keys.flatten(0, 2).transpose(1, 2))
        if softcap is not None:
            products = in_pieces(torch.tanh, products.div_(softcap)).mul_(softcap)
        scores = products.view(groups, num_sets, num_blocks, -1, BLOCK)
        rows = scores[:, :, :, :used].unflatten(3, (-1, per_group))
        return _KeySet(scores, rows, values)

    @property
    def num_blocks(self) -> int:
        """N."""
        return self.scores.shape[2]

    def hide(self, positions: Tensor, start: int, window: int | None) -> None:
        """Masks keys behind the rows' ``positions`` or outside their window.

        Args:
            positions: int64[R].
            start: position of the first key.
            window: see ``ScoreOptions``.
        """
        keys = torch.arange(start, start + self.num_blocks * BLOCK, device=positions.device)
        hidden = keys > positions[:, None]
        if window is not None:
            hidden |= keys <= positions[:, None] - window
        num_sets, num_blocks, num_rows = self.rows.shape[1:4]
        by_block = hidden.view(num_sets, num_rows, num_blocks, BLOCK).transpose(1, 2)
        self.rows.masked_fill_(by_block[None, :, :, :, None], -torch.inf)

    def best(self) -> Tensor:
        """[G, R, P]: the largest score of every row."""
        return self.rows.amax((2, 5)).flatten(1, 2)

    def weighted(self, top: Tensor) -> Iterator[Tensor]:
        """Per block, [G, R, P, D + ones]: weighted values, and the sums of the weights.

        Args:
            top: [G, R, P], subtracted from the scores.
        """
        groups, num_sets, _, num_rows, per_group, _ = self.rows.shape
        self.rows.sub_(top.view(groups, num_sets, 1, num_rows, per_group, 1))
        weights = in_pieces(torch.exp, self.scores.flatten(0, 2))
        products = torch.bmm(weights, self.values.flatten(0, 2))
        sums = products.view(*self.scores.shape[:4], -1)[:, :, :, : num_rows * per_group]
        for block in sums.unflatten(3, (num_rows, per_group)).unbind(2):
            yield block.flatten(1, 2)


def padded_rows(num: int) -> int:
    """Query rows of a product that has ``num`` of them: the next power of two, at least 8."""
    return max(_LEAST_ROWS, 1 << (num - 1).bit_length())


def in_pieces(function: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """Applies an elementwise function so that an element has the same bits in every tensor.

    On a CPU torch computes exp, tanh and the like in vector registers, and what is left over at the
    end of a tensor, or of a thread's share of it, by scalar functions, whose last bit may differ.
    Here pieces fill whole registers and run on one thread. Sums, products, quotients and roots are
    rounded exactly and need no such care.
    """
    if tensor.is_cuda:
        return function(tensor)
    size = tensor.numel()
    flat = pad(tensor.reshape(-1), (0, -size % _REGISTERS))
    pieces = [function(piece) for piece in flat.split(_PIECE)]
    whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return whole[:size].view(tensor.shape)


def row_ranges(rows: Sequence[Rows], size: int) -> Iterator[list[RowRange]]:
    """Cuts the packed rows of a pass into passes of at most ``size`` rows, in packing order."""
    current: list[RowRange] = []
    room = size
    for part in rows:
        start = 0
        while start < len(part):
            stop = min(start + room, len(part))
            current.append(RowRange(part, start, stop))
            start, room = stop, room - (stop - start)
            if not room:
                yield current
                current, room = [], size
    if current:
        yield current


def packed(parts: Sequence[RowRange], name: str, num_rows: int) -> IntArray:
    """int64[num_rows]: "tokens" or "positions" of the rows, then zeros for padding."""
    array = np.zeros(num_rows, np.int64)
    offset = 0
    for part in parts:
        array[offset : offset + len(part)] = getattr(part.rows, name)[part.start : part.stop]
        offset += len(part)
    return array
