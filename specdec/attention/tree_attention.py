"""Key-value caches of requests, and tree attention over them as transformers' attention function.

The cache of a request is a prefix region, then a tree region (PipeDec 3.4.2). Slot ``s <
cached_len`` belongs to the committed token at position ``s``. The entries of the tree region follow
in any order: a row (token of a pass) comes with the ids of its ancestors, which determine what it
sees (SwiftSpec 3.2), so a commit may move entries from the end into the slots of dropped ones.

Invariant: after each commit the prefix region equals a fresh forward over the first ``cached_len``
committed tokens, and each entry of the tree region equals a fresh forward over its path.

A cache addresses slots; its storage maps slots to memory. ``Contiguous`` storage, one tensor per
request, is read in place. ``Paged`` storage (PagedAttention, Kwon et al. 2023; SpecPipe 4) maps
slot ``s`` through a block table to row ``table[s // block] * block + s % block`` of a pool that all
requests of a stage share, and gathers the rows that a pass reads.

A pass packs the rows of one or more requests into one sequence [1, sum R]. All layers but attention
treat rows alike; attention lets each request's rows attend to their own cache. The pass's plan
(``PassPlan``) is the keyword argument ``PLAN`` of the model's forward, which transformers passes on
to every layer and to the attention function. transformers creates no mask for an attention function
without a registered mask function; masks come from the plan.

Shape letters: L layers, H query heads, G key/value heads, P = H / G, D head size, C capacity in
slots, n slots in use, R rows of one request in a pass (prefix rows, then W tree rows), T entries of
the tree region, M columns of its mask, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from einops import rearrange, repeat
from numpy import count_nonzero
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from specdec.device import to_device
from specdec.errors import UserError
from specdec.types import BoolArray, Commit, CommitKind, HiddenName, IntArray, TreeRows

_FIRST_BLOCKS = 64  # blocks that a new pool allocates
_LEAST_GROWTH = 128  # slots
_GROWTH = 1 / 32  # share of the capacity; small, because requests reserve what they need

Pair = tuple[Tensor, Tensor]  # keys and values


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec:
    """Shape, dtype and device of the caches of one ``ModelRunner``, for the layers that it runs."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    def empty(self, num_slots: int) -> Tensor:
        shape = (self.num_layers, 2, self.num_kv_heads, num_slots, self.head_dim)
        return torch.empty(shape, dtype=self.dtype, device=self.device)


Store = Callable[[int, Tensor, Tensor], Pair]
"""Function (layer, key, value) that stores rows [1, G, R, D] and returns all slots [1, G, n, D]."""


Buffers = tuple[Tensor, Callable[[], None]]
"""Keys and values [2 L, 1, G, n or more, D], and a function that must be called after the pass."""


def _nothing() -> None:
    """Does nothing: contiguous memory needs no action after a pass."""


class Contiguous:
    """Stores a cache in ``tensor`` [L, 2, G, C, D]; ``layers`` is its view [2 L, 1, G, C, D]."""

    def __init__(
        self, *, make: Callable[[int], Tensor], capacity: int, growth: float = _GROWTH
    ) -> None:
        """Allocates ``capacity`` slots by ``make``, which maps a number of slots to a new tensor
        [L, 2, G, slots, D]. ``growth``: least relative increase when a full tensor is replaced.
        """
        self._make = make
        self._growth = growth
        self._allocate(capacity)

    def reserve(self, end: int, used: int) -> None:
        """Makes room for at least ``end`` slots; keeps the contents of the first ``used``."""
        if end > self.capacity:
            old = self.tensor
            more = max(_LEAST_GROWTH, int(self._growth * self.capacity))
            self._allocate(max(end, self.capacity + more))
            self.tensor[:, :, :, :used] = old[:, :, :, :used]

    def writer(self, start: int, end: int) -> Store:
        """Returns the ``Store`` of a pass whose rows get the slots ``start`` .. ``end`` - 1."""
        written = self.layers.narrow(3, start, end - start).unbind(0)
        read = self.layers.narrow(3, 0, end).unbind(0)

        def store(layer: int, key: Tensor, value: Tensor) -> Pair:
            written[2 * layer].copy_(key)
            written[2 * layer + 1].copy_(value)
            return read[2 * layer], read[2 * layer + 1]

        return store

    def buffers(self, start: int, end: int) -> Buffers:
        return self.layers, _nothing

    def contents(self) -> Tensor:
        return self.tensor

    def copy(self, sources: IntArray, targets: IntArray) -> None:
        """Copies slots ``sources`` to ``targets``; reads all sources before it writes."""
        there = self.tensor.index_select(3, to_device(sources, self.tensor.device))
        self.tensor.index_copy_(3, to_device(targets, self.tensor.device), there)

    def trim(self, used: int) -> None:
        """Does nothing: no other request can use the slots of this tensor beyond ``used``."""

    def _allocate(self, capacity: int) -> None:
        self.tensor = self._make(capacity)
        self.layers = layer_views(self.tensor)
        self.capacity: int = self.tensor.shape[3]


def layer_views(tensor: Tensor) -> Tensor:
    """Returns a view [2 L, 1, G, C, D] of [L, 2, G, C, D]: each layer's keys, then its values."""
    return rearrange(tensor, "l kv g c d -> (l kv) 1 g c d")


class BlockPool:
    """A pool of cache blocks of ``block_tokens`` slots, shared by all requests of a pipeline stage;
    ``peak`` is the largest number of blocks in use at the same time so far.
    """

    def __init__(self, *, spec: CacheSpec, num_blocks: int, block_tokens: int) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.peak = 0
        self._free = list(range(num_blocks - 1, -1, -1))  # popped from the end: low numbers first
        most = num_blocks * block_tokens
        self._memory = Contiguous(
            make=lambda slots: spec.empty(min(slots, most)),
            capacity=_FIRST_BLOCKS * block_tokens,
            growth=1.0,
        )

    @property
    def rows(self) -> Tensor:
        """Returns the memory, [2 L, 1, G, allocated slots, D], which doubles when it is full."""
        return self._memory.layers

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def take(self, num: int) -> list[int]:
        if num > len(self._free):
            raise RuntimeError(
                f"a request needs {num} more blocks, but only {len(self._free)} of"
                f" {self.num_blocks} are free: it exceeds the number it was admitted with"
            )
        blocks = [self._free.pop() for _ in range(num)]
        self.peak = max(self.peak, self.num_used)
        end = (max(blocks, default=-1) + 1) * self.block_tokens
        self._memory.reserve(end, self._memory.capacity)
        return blocks

    def give_back(self, blocks: Sequence[int]) -> None:
        if not blocks:
            return  # the common case, once per step
        assert not set(blocks) & set(self._free), f"blocks {blocks} are freed twice"
        self._free.extend(blocks)


class Paged:
    def __init__(self, *, pool: BlockPool) -> None:
        self._pool = pool
        self._table: list[int] = []

    @property
    def capacity(self) -> int:
        return len(self._table) * self._pool.block_tokens

    def reserve(self, end: int, used: int) -> None:
        missing = -(-end // self._pool.block_tokens) - len(self._table)
        if missing > 0:
            self._table += self._pool.take(missing)

    def writer(self, start: int, end: int) -> Store:
        index = self._index(np.arange(end))
        new, written = index[start:], self._pool.rows.unbind(0)
        read = self._pool.rows.index_select(3, index).unbind(0)

        def store(layer: int, key: Tensor, value: Tensor) -> Pair:
            for at, rows in ((2 * layer, key), (2 * layer + 1, value)):
                written[at].index_copy_(2, new, rows)
                read[at][:, :, start:] = rows
            return read[2 * layer], read[2 * layer + 1]

        return store

    def buffers(self, start: int, end: int) -> Buffers:
        index = self._index(np.arange(end))
        copy = self._pool.rows.index_select(3, index)

        def write_back() -> None:
            self._pool.rows.index_copy_(3, index[start:], copy[..., start:, :])

        return copy, write_back

    def contents(self) -> Tensor:
        rows = self._pool.rows.index_select(3, self._index(np.arange(self.capacity)))
        return rearrange(rows, "(l kv) 1 g n d -> l kv g n d", kv=2)

    def copy(self, sources: IntArray, targets: IntArray) -> None:
        rows = self._pool.rows
        rows.index_copy_(3, self._index(targets), rows.index_select(3, self._index(sources)))

    def trim(self, used: int) -> None:
        kept = -(-used // self._pool.block_tokens)
        self._pool.give_back(self._table[kept:])
        del self._table[kept:]

    def _index(self, slots: IntArray) -> Tensor:
        block, offset = np.divmod(slots, self._pool.block_tokens)
        rows = np.array(self._table, np.int64)[block] * self._pool.block_tokens + offset
        return to_device(rows, self._pool.rows.device)


Storage: TypeAlias = Contiguous | Paged


EMPTY: IntArray = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """The rows (tokens) of one request in one pass; row i gets slot ``start`` + i of ``cache``."""

    cache: TreeCache
    tokens: IntArray  # int64[R], prefix rows first, then tree nodes
    positions: IntArray  # int64[R], absolute positions
    node_ids: IntArray  # int64[W]
    num_prefix: int  # R - W
    start: int
    first_masked: int  # every row sees all slots before this one
    # bool[R, start + R - first_masked]: the slots from ``first_masked`` on that each row sees
    visible: BoolArray

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def causal(self) -> bool:
        """Returns whether every row sees all slots up to its own."""
        num_later = len(self.tokens) * (len(self.tokens) - 1) // 2  # pairs of a row and a later row
        return int(np.count_nonzero(self.visible)) == self.visible.size - num_later

    @property
    def end(self) -> int:
        """Returns the number of cache slots in use, including the slots of these rows."""
        return self.start + len(self.tokens)

    def cut(self, start: int, stop: int) -> Rows:
        """Returns rows ``start`` .. ``stop`` - 1, for a pass after that of the rows before them."""
        num_prefix = max(0, min(stop, self.num_prefix) - start)
        # Nodes see all of the prefix, and so all of its rows: their columns are not masked.
        unmasked = self.num_prefix if start >= self.num_prefix else 0
        return replace(
            self,
            tokens=self.tokens[start:stop],
            positions=self.positions[start:stop],
            node_ids=self.node_ids[
                max(0, start - self.num_prefix) : max(0, stop - self.num_prefix)
            ],
            num_prefix=num_prefix,
            start=self.start + start,
            first_masked=self.first_masked + unmasked,
            visible=self.visible[start:stop, unmasked : self.start + stop - self.first_masked],
        )


class TreeCache:
    """Keys and values of one request, for all layers of one ``ModelRunner``.

    Attributes:
        cached_len: number of committed tokens in the prefix region. ``rows`` adds its prefix tokens
            to this number before the runner's ``forward`` has written their entries.
        node_ids: int64[T], node ids of the tree region, in slot order.
        node_positions: int64[T], their absolute positions.
    """

    def __init__(self, *, spec: CacheSpec, capacity: int, storage: Storage | None = None) -> None:
        if capacity < 1:
            raise ValueError(f"cache capacity {capacity} must be at least 1 slot")
        self.spec = spec
        self.cached_len = 0
        self.node_ids = self.node_positions = EMPTY
        self._kv = Contiguous(make=spec.empty, capacity=capacity) if storage is None else storage
        self._step = -1

    # State.

    @property
    def capacity(self) -> int:
        return self._kv.capacity

    @property
    def storage(self) -> Tensor:
        return self._kv.contents()

    def slot_writer(self, start: int, end: int) -> Store:
        return self._kv.writer(start, end)

    def buffers(self, rows: Rows) -> Buffers:
        return self._kv.buffers(rows.start, rows.end)

    @property
    def num_nodes(self) -> int:
        return len(self.node_ids)

    def has(self, node_ids: IntArray) -> BoolArray:
        return np.isin(node_ids, self.node_ids)

    def key_positions(self, end: int) -> IntArray:
        """Returns the absolute positions, int64[end], of the entries in the first ``end`` slots."""
        positions = np.arange(end)
        positions[self.cached_len :] = self.node_positions[: max(0, end - self.cached_len)]
        return positions

    # Growing.

    def rows(self, *, prefix_tokens: IntArray = EMPTY, tree: TreeRows | None = None) -> Rows:
        """Reserves slots for the rows of one pass and returns them for ``ModelRunner.forward``.

        ``prefix_tokens``, int64[R - W], continue the prefix, with causal visibility; they need an
        empty tree region. A node of ``tree`` sees the prefix, its ancestors in the cache and in
        earlier rows, and itself (the mask need not be square, SwiftSpec 3.1); a node whose parent
        is in neither follows the last token of the prefix.
        """
        start, num_prefix = self.cached_len + self.num_nodes, len(prefix_tokens)
        num_rows = num_prefix + (0 if tree is None else len(tree.tokens))
        self._kv.reserve(start + num_rows, start)
        if num_prefix:
            assert not self.num_nodes, "committed tokens are missing below entries of the tree"
            self.cached_len += num_prefix
        if tree is not None and not num_prefix:
            tokens, positions = tree.tokens, tree.positions
            first_masked, visible = self.cached_len, self._append(tree, positions)
        else:
            tokens, positions = prefix_tokens, np.arange(start, start + num_prefix)
            first_masked, visible = start, np.tri(num_rows, dtype=np.bool_)
            if tree is not None:
                tokens = np.concatenate([tokens, tree.tokens])
                positions = np.concatenate([positions, tree.positions])
                visible[num_prefix:, num_prefix:] = self._append(tree, tree.positions)
        return Rows(
            cache=self,
            tokens=tokens,
            positions=positions,
            node_ids=EMPTY if tree is None else tree.node_ids,
            num_prefix=num_prefix,
            start=start,
            first_masked=first_masked,
            visible=visible,
        )

    def _append(self, tree: TreeRows, positions: IntArray) -> BoolArray:
        """Adds W nodes to T tree entries; returns which entries each node sees, bool[W, T + W]."""
        old = self.num_nodes
        ids = self.node_ids = np.concatenate([self.node_ids, tree.node_ids])
        self.node_positions = np.concatenate([self.node_positions, positions])
        order = ids.argsort()
        known = ids.take(order)
        assert True not in (known[1:] == known[:-1]), f"one of {tree.node_ids} has an entry already"
        at = order.take(known.searchsorted(tree.paths), mode="clip")
        visible = np.zeros((len(positions), len(ids)), np.bool_)
        levels, rows = (ids.take(at) == tree.paths).nonzero()
        entries = at[levels, rows]
        visible[rows, entries] = True
        # A path has one node per position behind the prefix; what is missing is not in the cache.
        is_whole = np.add.reduce(visible, 1) == positions - self.cached_len + 1
        assert False not in is_whole, f"some of {tree.node_ids} do not continue the cached paths"
        assert False not in (entries <= old + rows), f"children before parents: {tree.node_ids}"
        return visible

    # Shrinking.

    def commit(self, commit: Commit) -> None:
        """Moves old root and accepted nodes to the prefix; drops nodes not in ``commit.kept_ids``.

        If the cache lacks some of the nodes to move, it moves those before the first such node and
        empties the tree region; the remaining tokens must be passed to ``rows``. One gather over
        all layers copies only entries that change slots. Repeating a step's call has no effect.
        """
        if commit.step <= self._step:
            return
        self._step = commit.step
        adopted, kept = self._adoptable(commit), EMPTY
        # On a miss the only kept node is the new root, which has no entry yet.
        is_hit = commit.kind is CommitKind.HIT
        if is_hit and self.cached_len + len(adopted) >= commit.prefix_len:
            kept = commit.keeps(self.node_ids).nonzero()[0]
        new = kept
        if len(kept):
            # Kept entries inside the new region keep their slots; the others fill the free slots.
            new = np.full(len(kept), -1)
            inside = (kept >= len(adopted)) & (kept < len(adopted) + len(kept))
            new[kept[inside] - len(adopted)] = kept[inside]
            new[new < 0] = kept[~inside]
        sources = np.concatenate([adopted, new])
        moved = (sources != np.arange(len(sources))).nonzero()[0]
        if len(moved):
            self._copy_slots(self.cached_len + sources[moved], self.cached_len + moved)
        self.cached_len += len(adopted)
        self.node_ids, self.node_positions = self.node_ids[new], self.node_positions[new]
        self._kv.trim(self.cached_len + self.num_nodes)

    def truncate(self, length: int) -> None:
        self.cached_len = min(self.cached_len, length)
        self.node_ids = self.node_positions = EMPTY
        self._kv.trim(self.cached_len)

    def close(self) -> None:
        self._kv.trim(0)

    def _adoptable(self, commit: Commit) -> IntArray:
        """Returns indices of the tree entries that a commit moves to the prefix, in path order."""
        entries = {node: entry for entry, node in enumerate(self.node_ids.tolist())}
        adopted: list[int] = []
        position = commit.prefix_len - len(commit.retired_ids)
        for entry in map(entries.get, commit.retired_ids.tolist()):
            if position >= self.cached_len:
                if entry is None or position != self.cached_len + len(adopted):
                    break
                adopted.append(entry)
            position += 1
        return np.array(adopted, np.int64)

    def _copy_slots(self, sources: IntArray, targets: IntArray) -> None:
        """Copies keys and values between slots; tests replace this method to inject faults."""
        self._kv.copy(sources, targets)


PLAN = "specdec_plan"
"""Name of the keyword argument of a model's forward that takes the ``PassPlan``."""


@dataclass(slots=True)
class ScoreOptions:
    scaling: float | None = None  # factor of the scores; None means 1 / sqrt(D)
    # keys at least this many positions back are masked; None: no sliding window
    window: int | None = None
    softcap: float | None = None  # scores s become softcap * tanh(s / softcap); None: no cap
    # further arguments of the family; checked once, when a runner is created
    others: dict[str, Any] = field(default_factory=dict)


class PassPlan:
    """Carries the data of one forward pass to the attention function and the runner's hooks.

    ``captured`` receives hidden states [1, sum R, E] by name; ``hidden``, [1, sum R, E], is the
    input of a slice of layers that does not begin with the first layer, else None.
    """

    def __init__(self, *, first_layer: int, hidden: Tensor | None) -> None:
        self.cache = PassCache(first_layer=first_layer)
        self.captured: dict[HiddenName, Tensor] = {}
        self.hidden = hidden

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: ScoreOptions) -> Tensor:
        raise NotImplementedError


def tree_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,  # noqa: ARG001 - transformers defines the signature
    scaling: float | None = None,
    dropout: float = 0.0,  # noqa: ARG001
    sliding_window: int | None = None,
    softcap: float | None = None,
    specdec_plan: PassPlan | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Computes attention of one layer, with the signature that transformers calls.

    Maps query [1, H, sum R, D], and key and value [1, G, sum R, D] of this pass's rows, to ([1, sum
    R, H, D], None).
    """
    if specdec_plan is None:
        kind = getattr(getattr(module, "config", None), "model_type", type(module).__name__)
        raise UserError(
            f"model type {kind!r} cannot be used: transformers passes no arguments of the model on"
            " to its attention; use a family such as llama, qwen3 or gpt2"
        )
    options = ScoreOptions(scaling, sliding_window, softcap, others)
    return specdec_plan.attend(query, key, value, options), None


@cache
def registered() -> str:
    """Registers ``tree_attention`` in transformers; returns its name there.

    transformers is imported in this function, so that configurations are checked without it.
    """
    from transformers import AttentionInterface

    AttentionInterface.register("specdec", tree_attention)
    return "specdec"


class PassCache:
    """Replaces transformers' cache. ``update`` only sets ``layer``, the index of the current layer
    in the slice (-1 before the first one); ``PassPlan.attend`` then writes keys and values.
    """

    is_compileable = False

    def __init__(self, *, first_layer: int) -> None:
        self.first_layer = first_layer
        self.layer = -1

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Pair:
        self.layer = layer_idx - self.first_layer
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns 0: positions are passed explicitly, and no mask is derived from the length."""
        return 0


@dataclass(kw_only=True, eq=False)
class Visibility:
    """Which cache slots each row of a pass attends to, as tensors on the device.

    ``lengths``, int32[2], is (first, end): every row sees all slots before ``first`` and none from
    ``end`` on. ``visible``, uint8[R, M], says which slots in between each row sees. Masks have
    ``num_slots`` columns (C) and the given ``dtype``.
    """

    lengths: Tensor
    visible: Tensor
    num_slots: int
    dtype: torch.dtype
    # int64[R] and int64[M], absolute positions of the rows and of the entries from ``first`` on;
    # for sliding windows only
    positions: Tensor | None = None
    column_positions: Tensor | None = None
    # whether each row sees exactly the slots up to its own, the last row's slot being the last one
    causal: bool = False
    _masks: dict[int | None, Tensor] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.lengths = self.lengths.to(torch.int32)

    def mask(self, window: int | None = None) -> Tensor:
        """Returns the additive mask [R, C] for a sliding window of ``window`` positions, if any."""
        if window not in self._masks:
            first, end = self.lengths[0], self.lengths[1]
            slots = torch.arange(self.num_slots, device=self.lengths.device)
            columns = (slots - first).clamp(0, self.visible.shape[1] - 1)
            seen = (slots < first) | (self.visible.bool()[:, columns] & (slots < end))
            if window is not None:
                assert self.positions is not None, "windows need positions"
                assert self.column_positions is not None, "windows need positions"
                slot_positions = torch.where(slots < first, slots, self.column_positions[columns])
                seen = seen & (slot_positions > self.positions[:, None] - window)
            mask = torch.zeros(seen.shape, dtype=self.dtype, device=seen.device)
            self._masks[window] = mask.masked_fill(~seen, torch.finfo(self.dtype).min)
        return self._masks[window]


Kernel = Callable[[Tensor, Tensor, Tensor, Visibility, float | None], Tensor]
"""Attention (query [1, H, R, D], key, value [1, G, C, D], visibility, scaling) -> [1, H, R, D]."""


class RequestPart:
    """One request's ``rows`` in a pass of several requests; ``columns``: their places in it."""

    def __init__(self, rows: Rows, offset: int = 0) -> None:
        self.rows = rows
        self.columns = slice(offset, offset + len(rows))
        self._last = int(rows.positions.max())
        self._full = bool(count_nonzero(rows.visible) == rows.visible.size)

    @cached_property
    def store(self) -> Store:
        return self.rows.cache.slot_writer(self.rows.start, self.rows.end)

    @cached_property
    def seen(self) -> Visibility:
        rows, spec = self.rows, self.rows.cache.spec
        arrays = {
            "lengths": np.array([rows.first_masked, rows.end]),
            "visible": np.ascontiguousarray(rows.visible, np.uint8),
            "positions": rows.positions,
            "column_positions": rows.cache.key_positions(rows.end)[rows.first_masked :],
        }
        there: dict[str, Any] = {n: to_device(array, spec.device) for n, array in arrays.items()}
        return Visibility(
            num_slots=rows.end,
            dtype=spec.dtype,
            causal=rows.causal,
            **there,
        )

    def attend(
        self, query: Tensor, stored: Pair, options: ScoreOptions, kernel: Kernel | None
    ) -> Tensor:
        window = options.window
        if window is not None and self._last < window:
            window = None  # it would mask nothing
        if kernel is not None and options.softcap is None and window is None:
            return kernel(query, *stored, self.seen, options.scaling)
        mask = None if self._full and window is None else self.seen.mask(window)
        return dense_attention(query, *stored, mask, options.scaling, options.softcap)


def host_mask(rows: Rows, window: int | None) -> npt.NDArray[np.float32] | None:
    """Returns an additive mask float32[R, n] for a sliding window of ``window`` positions (None: no
    window). Returns None if a causal mask suffices, which the kernel must apply itself.
    """
    if window is not None and int(rows.positions.max()) < window:
        window = None  # it would mask nothing
    if window is None and rows.causal:
        return None
    seen = np.ones((len(rows), rows.end), np.bool_)
    seen[:, rows.first_masked :] = rows.visible
    if window is not None:
        seen &= rows.cache.key_positions(rows.end) > rows.positions[:, None] - window
    return np.where(seen, np.float32(0.0), np.finfo(np.float32).min)


class AttentionPlan(PassPlan):
    def __init__(
        self,
        *,
        rows: Sequence[Rows],
        first_layer: int,
        hidden: Tensor | None = None,
        kernel: Kernel | None = None,
    ) -> None:
        super().__init__(first_layer=first_layer, hidden=hidden)
        self._kernel = kernel
        self._parts = []
        offset = 0
        for part in rows:
            if len(part):
                self._parts.append(RequestPart(part, offset))
                offset += len(part)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: ScoreOptions) -> Tensor:
        layer, outputs = self.cache.layer, []
        for part in self._parts:
            columns = part.columns
            stored = part.store(layer, key[:, :, columns], value[:, :, columns])
            outputs.append(part.attend(query[:, :, columns], stored, options, self._kernel))
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)
        return output.transpose(1, 2)


_ANY_LENGTH = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None = None,
) -> Tensor:
    """Computes attention [1, H, R, D] by torch's ``scaled_dot_product_attention`` with an additive
    mask [R, C] over all slots (None: no mask), or by ``capped_attention`` if there is a softcap.
    """
    if softcap is not None:
        return capped_attention(query, key, value, mask, scaling, softcap)
    if query.device.type != "cuda":
        return scaled_dot_product_attention(query, key, value, mask, scale=scaling, enable_gqa=True)
    if mask is not None:  # which only cuDNN supports together with grouped query heads
        per_group = query.shape[1] // key.shape[1]
        key, value = (repeat(t, "b g c d -> b (g p) c d", p=per_group) for t in (key, value))
    # Without cuDNN, which makes a new execution plan for every context length.
    with sdpa_kernel(_ANY_LENGTH):
        return scaled_dot_product_attention(
            query, key, value, mask, scale=scaling, enable_gqa=mask is None
        )


def capped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
) -> Tensor:
    """Computes attention [1, H, R, D] in elementary operations; the fused kernels lack soft caps.
    Unless ``softcap`` is None, scores s become softcap * tanh(s / softcap) (Gemma 2).
    """
    scores = scores_of(query, key, scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    weights = scores.softmax(-1, dtype=accumulator(query.dtype)).to(query.dtype)
    return weighted_values(weights, value)


def scores_of(query: Tensor, key: Tensor, scaling: float | None) -> Tensor:
    """Returns scaled attention scores [1, G, P, R, C] for query [1, H, R, D], key [1, G, C, D]."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    grouped = rearrange(query, "b (g p) r d -> b g p r d", g=key.shape[1])
    return grouped @ rearrange(key, "b g c d -> b g 1 d c") * scale


def weighted_values(weights: Tensor, value: Tensor) -> Tensor:
    output = weights @ rearrange(value, "b g c d -> b g 1 c d")
    return rearrange(output, "b g p r d -> b (g p) r d")


def accumulator(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32
