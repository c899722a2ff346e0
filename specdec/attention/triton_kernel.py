"""Tree attention over prefix and tree in one Triton launch that splits the context among blocks.

As in SwiftSpec 3.3, the keys of one head are split among thread blocks, and their partial results
are summed without a second launch. SwiftSpec's blocks wait for each other's flags (NCCL's
low-latency protocol); here the last block to finish, determined by an atomic counter, sums all
parts. So no block ever waits, the order of summation is fixed, and the counter is 0 again at the
end, as replaying a CUDA graph requires.

Shape letters: H query heads, G key/value heads, P = H / G, D head size, R rows, C slots of the
cache, M columns of the mask, S splits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from einops import rearrange
from torch import Tensor

_KEY_BYTES = 16384  # per block of keys; values need as much, and pipelining a few times both
_QUERY_BYTES = 8192  # per block of rows; with the keys this stays below 99 KiB
_MAX_BLOCK_KEYS = 64
_MAX_BLOCK_ROWS = 64
_MIN_DOT = 16  # smallest dimension of a product on tensor cores
_BLOCKS_PER_PROCESSOR = 2
_INTERPRETED_SPLITS = 4
_LOG2_E = 1.4426950408889634


# fmt: off
# Row counts and widths of masks vary from pass to pass; a value of 1, or a multiple of 16, would
# compile the kernel again.
@triton.jit(do_not_specialize=["num_rows", "visible_row"])
def _tree_attention(  # type: ignore[no-untyped-def]
    query, key, value, visible, lengths, output, sums, tops, counters, scale, num_rows,
    query_row, query_head, key_head, key_slot, value_head, value_slot, visible_row,
    HEADS: tl.constexpr, PER_GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, SPLITS: tl.constexpr,
):
    # fmt: on
    block, group, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    # A block processes the rows of all query heads that share one key/value head.
    lanes = tl.arange(0, BLOCK_ROWS)
    items = block * BLOCK_ROWS + lanes
    rows, heads = items // PER_GROUP, group * PER_GROUP + items % PER_GROUP
    inside = rows < num_rows
    dims = tl.arange(0, BLOCK_DIM)
    used = inside[:, None] & (dims < DIM)[None, :]
    at_query = query + rows[:, None] * query_row + heads[:, None] * query_head + dims[None, :]
    q = tl.load(at_query, mask=used, other=0.0)
    first, end = tl.load(lengths).to(tl.int32), tl.load(lengths + 1).to(tl.int32)
    share = tl.cdiv(tl.cdiv(end, SPLITS), BLOCK_KEYS) * BLOCK_KEYS
    start = split * share
    wide = group.to(tl.int64)  # offsets exceed 32 bits at a million slots
    result, top, total = _scan(
        q, key + wide * key_head, value + wide * value_head, key_slot, value_slot,
        visible + rows * visible_row, inside, first, start, tl.minimum(end, start + share), scale,
        DIM, BLOCK_DIM, BLOCK_ROWS, BLOCK_KEYS,
    )  # fmt: skip
    at_output = output + (rows[:, None] * HEADS + heads[:, None]) * DIM + dims[None, :]
    if SPLITS == 1:
        result = result / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(at_output, result.to(output.dtype.element_ty), mask=used)
    else:
        item = block * tl.num_programs(1) + group
        part = item * SPLITS + split
        at_part = sums + (part * BLOCK_ROWS + lanes[:, None]) * BLOCK_DIM + dims[None, :]
        tl.store(at_part, result)
        tl.store(tops + part * 2 * BLOCK_ROWS + lanes, top)
        tl.store(tops + (part * 2 + 1) * BLOCK_ROWS + lanes, total)
        tl.debug_barrier()  # all threads have stored before one of them counts
        finished = tl.atomic_add(counters + item, 1, sem="acq_rel", scope="gpu")
        if finished == SPLITS - 1:
            merged = _merged(sums, tops, item, dims, BLOCK_DIM, BLOCK_ROWS, SPLITS)
            tl.store(at_output, merged.to(output.dtype.element_ty), mask=used)
            tl.store(counters + item, 0)


# fmt: off
@triton.jit
def _scan(  # type: ignore[no-untyped-def]
    q, key, value, key_slot, value_slot, visible, inside, first, start, stop, scale,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):
    # fmt: on
    """Attends to the slots start .. stop - 1. Returns, per row of the block, unnormalised sums of
    weighted values [BLOCK_ROWS, BLOCK_DIM], largest exponents (base 2) and sums of weights.
    """
    dims = tl.arange(0, BLOCK_DIM)
    within = dims < DIM
    top = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    result = tl.zeros([BLOCK_ROWS, BLOCK_DIM], tl.float32)
    for begin in range(start, stop, BLOCK_KEYS):
        slots = begin + tl.arange(0, BLOCK_KEYS)
        stored = slots < stop
        loaded = stored[:, None] & within[None, :]
        at_slots = slots[:, None].to(tl.int64)
        k = tl.load(key + at_slots * key_slot + dims[None, :], mask=loaded, other=0.0)
        v = tl.load(value + at_slots * value_slot + dims[None, :], mask=loaded, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        seen = inside[:, None] & stored[None, :]
        if begin + BLOCK_KEYS > first:
            in_tree = seen & (slots[None, :] >= first)
            bits = tl.load(visible[:, None] + (slots[None, :] - first), mask=in_tree, other=0)
            seen = seen & ((slots[None, :] < first) | (bits != 0))
        scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - safe[:, None])
        decay = tl.exp2(top - safe)
        total = total * decay + tl.sum(weights, 1)
        result = result * decay[:, None]
        result += tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = new_top
    return result, top, total


# fmt: off
@triton.jit
def _merged(  # type: ignore[no-untyped-def]
    sums, tops, item, dims,
    BLOCK_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, SPLITS: tl.constexpr,
):
    # fmt: on
    lanes = tl.arange(0, BLOCK_ROWS)
    top = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    result = tl.zeros([BLOCK_ROWS, BLOCK_DIM], tl.float32)
    for split in range(SPLITS):
        part = item * SPLITS + split
        # Bypasses the L1 cache, which is not coherent between multiprocessors.
        at_top = tops + part * 2 * BLOCK_ROWS + lanes
        part_top = tl.load(at_top, cache_modifier=".cg")
        part_total = tl.load(at_top + BLOCK_ROWS, cache_modifier=".cg")
        at_part = sums + (part * BLOCK_ROWS + lanes[:, None]) * BLOCK_DIM + dims[None, :]
        part_result = tl.load(at_part, cache_modifier=".cg")
        new_top = tl.maximum(top, part_top)
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        decay, gain = tl.exp2(top - safe), tl.exp2(part_top - safe)
        total = total * decay + part_total * gain
        result = result * decay[:, None] + part_result * gain[:, None]
        top = new_top
    return result / tl.where(total == 0.0, 1.0, total)[:, None]


class TreeAttention:
    """Launches the kernel and owns scratch memory for the splits; use an object per CUDA stream."""

    def __init__(self, *, splits: int | None = None) -> None:
        """``splits``: number of parts into which the context is cut; None: enough for the GPU."""
        self._splits = splits
        self._scratch: dict[
            tuple[object, ...], tuple[Tensor, Tensor, Tensor]
        ] = {}

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        lengths: Tensor,
        visible: Tensor,
        scaling: float | None = None
    ) -> Tensor:
        """Attends to the slots before ``first`` and to visible slots of ``first`` .. ``end`` - 1.

        A row that sees no slot gets zeros. Tensors are float32, float16 or bfloat16, contiguous in
        their last dimension.

        Args:
            query: [1, H, R, D].
            key, value: [1, G, C, D].
            lengths: integer [2] on the device, (first, end); read by the kernel, so that a captured
                launch works for every length.
            visible: uint8[R, M >= end - first], which slots from ``first`` on a row sees.

        Returns:
            [1, H, R, D], a view of memory in the order R, H, D.
        """
        if any(t.shape[-1] > 1 and t.stride(-1) != 1 for t in (query, key, value, visible)):
            raise ValueError("an operand is not contiguous in its last dimension")
        heads, num_rows, dim = query.shape[1:]
        groups, capacity = key.shape[1:3]
        per_group = heads // groups
        block_rows, block_keys, block_dim = _block(num_rows * per_group, dim, query.element_size())
        blocks = triton.cdiv(num_rows * per_group, block_rows)
        most = triton.cdiv(capacity, block_keys)
        splits = self._splits or _splits(query.device, groups * blocks, most)
        scale = dim**-0.5 if scaling is None else scaling
        output = torch.empty(num_rows, heads, dim, dtype=query.dtype, device=query.device)
        shape = (blocks * groups, splits, block_rows, block_dim)
        sums, tops, counters = self._parts(query.device, *shape)
        strides = [query.stride(2), query.stride(1)]
        strides += [key.stride(1), key.stride(2), value.stride(1), value.stride(2)]
        tensors = (query, key, value, visible, lengths, output, sums, tops, counters)
        _tree_attention[(blocks, groups, splits)](
            *tensors,
            scale * _LOG2_E,
            num_rows,
            *strides,
            visible.stride(0),
            HEADS=heads,
            PER_GROUP=per_group,
            DIM=dim,
            BLOCK_DIM=block_dim,
            BLOCK_ROWS=block_rows,
            BLOCK_KEYS=block_keys,
            SPLITS=splits,
        )
        return rearrange(output, "r h d -> 1 h r d")

    def _parts(
        self, device: torch.device, items: int, splits: int, rows: int, dim: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        shape = (device, items, splits, rows, dim)
        if shape not in self._scratch:
            self._scratch[shape] = (
                torch.empty(items * splits, rows, dim, device=device),
                torch.empty(items * splits, 2, rows, device=device),
                torch.zeros(items, dtype=torch.int32, device=device),
            )
        return self._scratch[shape]


def _block(num_items: int, dim: int, itemsize: int) -> tuple[int, int, int]:
    block_dim = max(_MIN_DOT, triton.next_power_of_2(dim))
    most_rows = min(_MAX_BLOCK_ROWS, max(_MIN_DOT, _QUERY_BYTES // (block_dim * itemsize)))
    rows = min(most_rows, max(_MIN_DOT, triton.next_power_of_2(num_items)))
    keys = min(_MAX_BLOCK_KEYS, max(_MIN_DOT, _KEY_BYTES // (block_dim * itemsize)))
    return rows, keys, block_dim


def _splits(device: torch.device, items: int, most: int) -> int:
    """Returns into how many parts, at most ``most``, to cut the context so that ``items`` blocks
    per part fill the GPU: a power of two, as each number compiles a kernel and allocates memory.
    """
    filling = _INTERPRETED_SPLITS
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        filling = triton.cdiv(_BLOCKS_PER_PROCESSOR * processors, items)
    return 1 << (max(1, min(most, filling)).bit_length() - 1)
