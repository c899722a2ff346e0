"""CUDA graphs of passes of few rows over static buffers (SwiftSpec 4): ``model.graphs``.

A graph reads and writes tensors at fixed addresses with fixed shapes, so a request's keys and
values are stored in an arena, which later requests reuse; rows are padded to one of a few counts,
masks to one of a few widths; all inputs from the host are sent to the device in one copy. Padding
rows repeat the last row and write to a spare slot that no row sees. ``model.graphs=replay`` does
the same without graphs, on any device.

Before a timed run, graphs are captured not only for the shapes of the passes before it, but also
for fewer rows and shorter contexts.

Shape letters: L layers, G key/value heads, D head size, C slots of an arena (without its spare), R
(padded) rows, A rows whose logits are computed, M columns of the mask, E hidden size, V vocabulary.
"""

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from specdec.attention.backends import Attention
from specdec.attention.tree_attention import (
    CacheSpec,
    Contiguous,
    PassPlan,
    Rows,
    ScoreOptions,
    TreeCache,
    Visibility,
    dense_attention,
    layer_views,
)
from specdec.clocks import timed_runs
from specdec.device import to_device
from specdec.errors import UserError
from specdec.models.runner import (
    ROW_COUNTS,
    Backend,
    Eager,
    RunnerOutput,
    in_parts,
    round_up,
)
from specdec.types import IntArray

T = TypeVar("T")

COLUMN_COUNTS = (64, 256, 1024)
"""Widths of masks, in tree entries; a pass with more entries runs without a graph."""

LEAST_CONTEXT = 64
"""Number of cache slots in the smallest arena and shortest captured context; a power of two."""

_MAX_REQUESTS = 4  # per captured pass; more run in one packed, uncaptured pass


class Arena:
    """Key/value memory at a fixed address, used by one request at a time. ``slots``, [L, 2, G, C,
    D], is for the cache; ``layers``, [2 L, 1, G, C + 1, D], also has a slot with index ``spare``.
    """

    def __init__(self, spec: CacheSpec, capacity: int) -> None:
        # Zeros: masked slots must be finite, because 0 * NaN is NaN.
        shape = (spec.num_layers, 2, spec.num_kv_heads, capacity + 1, spec.head_dim)
        storage = torch.zeros(shape, dtype=spec.dtype, device=spec.device)
        self.slots = storage.narrow(3, 0, capacity)
        self.layers = layer_views(storage)
        self.spare = capacity


class Arenas:
    def __init__(self, spec: CacheSpec) -> None:
        self._spec = spec
        self._free: dict[int, list[Arena]] = {}
        self._assigned: weakref.WeakKeyDictionary[TreeCache, list[Arena]]
        self._assigned = weakref.WeakKeyDictionary()

    def new_cache(self, capacity: int) -> TreeCache:
        """Returns a cache in an arena; it moves to a larger arena when it outgrows its own."""
        current: list[Arena] = []  # at most one; shared with the finalizer, unlike an attribute
        storage = Contiguous(make=lambda size: self._assign(current, size).slots, capacity=capacity)
        cache = TreeCache(spec=self._spec, capacity=capacity, storage=storage)
        self._assigned[cache] = current
        weakref.finalize(cache, self._release, current)
        return cache

    def of(self, cache: TreeCache) -> Arena | None:
        current = self._assigned.get(cache)
        return current[0] if current else None

    def _assign(self, current: list[Arena], size: int) -> Arena:
        # Few sizes, so that later requests can reuse arenas and the graphs captured over them; a
        # larger arena that is free has graphs already, a new one of the right size has none.
        capacity = max(LEAST_CONTEXT, 1 << (size - 1).bit_length())
        fits = [free for free, arenas in self._free.items() if arenas and free >= capacity]
        arena = self._free[min(fits)].pop() if fits else Arena(self._spec, capacity)
        self._release(current)
        current.append(arena)
        return arena

    def _release(self, current: list[Arena]) -> None:
        while current:
            arena = current.pop()
            self._free.setdefault(arena.spare, []).append(arena)


class Inputs:
    """Inputs of a pass in one device buffer, filled by one copy; ``hidden`` is a separate tensor.

    Attributes:
        tokens, positions, slots: int64[R], token, position and cache slot of each row.
        lengths, visible: int64[2] and uint8[R, M], see ``Visibility``.
        columns: int64[M], positions of the entries in the slots from ``lengths[0]`` on.
        hidden: [1, R, E] for a slice that is not the first; else None.
    """

    def __init__(
        self, num_rows: int, num_columns: int, spec: CacheSpec, hidden_size: int | None
    ) -> None:
        sizes = [num_rows, num_rows, num_rows, 2, num_columns]
        ends, shape = np.cumsum(sizes), (num_rows, num_columns)
        self._host = np.zeros(8 * ends[-1] + num_rows * num_columns, np.uint8)
        self._ints = np.split(self._host[: 8 * ends[-1]].view(np.int64), ends[:-1])
        self._visible = self._host[8 * ends[-1] :].reshape(shape)
        self._device = torch.zeros(len(self._host), dtype=torch.uint8, device=spec.device)
        ints, visible = self._device.tensor_split([8 * int(ends[-1])])
        self.tokens, self.positions, self.slots, self.lengths, self.columns = ints.view(
            torch.int64
        ).split(sizes)
        self.visible = visible.view(shape)
        self.hidden: Tensor | None = None
        if hidden_size is not None:
            size = (1, num_rows, hidden_size)
            self.hidden = torch.zeros(size, dtype=spec.dtype, device=spec.device)

    def idle(self, spare: int) -> None:
        """Fills in rows that see only slot 0 and write to the slot ``spare``: no cache changes."""
        tokens, positions, slots, lengths, columns = self._ints
        tokens[:], positions[:], slots[:], columns[:] = 0, 0, spare, 0
        lengths[:] = 1, 1
        self._visible[:] = 0
        self._device.copy_(torch.from_numpy(self._host), non_blocking=True)
        if self.hidden is not None:
            self.hidden.zero_()

    def fill(self, rows: Rows, spare: int, hidden: Tensor | None) -> None:
        """Pads ``rows`` and ``hidden`` and copies both; padding rows write to slot ``spare``."""
        tokens, positions, slots, lengths, columns = self._ints
        num, num_seen = len(rows), rows.visible.shape[1]
        tokens[:num], tokens[num:] = rows.tokens, rows.tokens[-1]
        positions[:num], positions[num:] = rows.positions, rows.positions[-1]
        slots[:num], slots[num:] = np.arange(rows.start, rows.end), spare
        lengths[:] = rows.first_masked, rows.end
        columns[:num_seen] = rows.cache.key_positions(rows.end)[rows.first_masked :]
        self._visible[:num, :num_seen] = rows.visible
        self._visible[:num, num_seen:] = 0
        self._visible[num:] = self._visible[num - 1]
        # Pageable memory is staged before the call returns, so the buffer may be reused at once.
        self._device.copy_(torch.from_numpy(self._host), non_blocking=True)
        if self.hidden is not None:
            assert hidden is not None, "hidden states enter every slice but the first"
            self.hidden[0, :num] = hidden
            self.hidden[0, num:] = self.hidden[0, num - 1]


class _Shape(NamedTuple):
    """Sizes that identify a graph; ``context`` is the number of cache slots attention reads."""

    arena: Arena
    num_rows: int
    num_columns: int
    context: int
    wants_logits: bool


class _StaticPlan(PassPlan):
    def __init__(self, shape: _Shape, inputs: Inputs, eager: Eager) -> None:
        super().__init__(first_layer=eager.layers.first_layer, hidden=inputs.hidden)
        self._kernel = eager.kernel
        self._slots = inputs.slots
        self._layers = shape.arena.layers.unbind(0)
        self._context = shape.context
        self._visibility = Visibility(
            lengths=inputs.lengths,
            visible=inputs.visible,
            num_slots=shape.context,
            dtype=shape.arena.layers.dtype,
            positions=inputs.positions,
            column_positions=inputs.columns,
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: ScoreOptions) -> Tensor:
        layer = self.cache.layer
        keys, values = self._layers[2 * layer], self._layers[2 * layer + 1]
        keys.index_copy_(2, self._slots, key)
        values.index_copy_(2, self._slots, value)
        keys, values = keys.narrow(2, 0, self._context), values.narrow(2, 0, self._context)
        scaling, window, softcap = options.scaling, options.window, options.softcap
        if self._kernel is not None and softcap is None and window is None:
            output = self._kernel(query, keys, values, self._visibility, scaling)
        else:
            mask = self._visibility.mask(window)
            output = dense_attention(query, keys, values, mask, scaling, softcap)
        return output.transpose(1, 2)


class Graphs(Backend):
    """Runs passes of few rows over static buffers, one graph per shape; ``eager`` runs others."""

    def __init__(self, eager: Eager, *, captures: bool) -> None:
        self.layers = eager.layers
        self.arenas = Arenas(eager.layers.spec)
        self.replays = 0
        self._eager = eager
        # Whether attention reads the context's length from device memory, so that one graph works
        # for every length.
        self._reads_lengths = eager.attention in (Attention.TRITON, Attention.FLASH)
        self._captures = captures
        self._inputs: dict[tuple[int, int], Inputs] = {}
        self.launches: dict[_Shape, Callable[[], RunnerOutput]] = {}
        self._occurred: dict[_Shape, None] = {}  # since the last timed run
        self._pool: Any = None
        timed_runs.observe(self)

    def new_cache(self, capacity: int) -> TreeCache:
        return self.arenas.new_cache(capacity)

    def serves(self, rows: Sequence[Rows]) -> bool:
        parts = [part for part in rows if len(part)]
        return 0 < len(parts) <= _MAX_REQUESTS and all(
            len(part) <= ROW_COUNTS[-1]
            and part.visible.shape[1] <= COLUMN_COUNTS[-1]
            and self.arenas.of(part.cache) is not None
            for part in parts
        )

    def run(
        self, rows: Sequence[Rows], hidden: Tensor | None, logits_rows: IntArray | None
    ) -> RunnerOutput:
        """Replays one graph per request; returns copies of the outputs, without padding rows."""
        if not self.serves(rows):
            return self._eager.run(rows, hidden, logits_rows)
        parts = [[part] for part in rows if len(part)]
        return in_parts(parts, hidden, logits_rows, self._replay)

    def _replay(
        self, part: Sequence[Rows], hidden: Tensor | None, logits_rows: IntArray
    ) -> RunnerOutput:
        (rows,) = part
        num_rows = round_up(len(rows), ROW_COUNTS)
        num_columns = round_up(rows.visible.shape[1], COLUMN_COUNTS)
        arena = self.arenas.of(rows.cache)
        assert arena is not None, "the cache is not in an arena"
        context = arena.spare
        if not self._reads_lengths:
            context = min(context, max(LEAST_CONTEXT, 1 << (rows.end - 1).bit_length()))
        shape = _Shape(arena, num_rows, num_columns, context, self.layers.wants_logits(logits_rows))
        self._inputs_of(shape).fill(rows, arena.spare, hidden)
        self.replays += 1
        if shape in self.launches:
            output = self.launches[shape]()
        else:
            self._occurred[shape] = None
            if self._captures and timed_runs.is_timed():
                output = self._launch_of(shape)()
            else:
                self._prepare(shape)
                output = self.launches[shape]()
        return _cut(output, len(rows), logits_rows)

    def begin_timed(self) -> None:
        occurred_shapes, self._occurred = list(self._occurred), {}
        device = self.layers.spec.device
        guard = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        with torch.inference_mode(), guard:
            for occurred in occurred_shapes:
                contexts = [occurred.context]
                while not self._reads_lengths and contexts[-1] > LEAST_CONTEXT:
                    contexts.append(contexts[-1] // 2)
                for num_rows in [count for count in ROW_COUNTS if count <= occurred.num_rows]:
                    for context in contexts:
                        shape = occurred._replace(num_rows=num_rows, context=context)
                        self._inputs_of(shape).idle(shape.arena.spare)
                        self._prepare(shape)

    def end_timed(self) -> None:
        """Does nothing: after a timed run ``_replay`` captures new shapes when they occur."""

    def _prepare(self, shape: _Shape) -> None:
        """Captures the graph of ``shape`` if there is none; its buffers must have valid inputs."""
        if shape in self.launches:
            return
        launch = self._launch_of(shape)
        if self._captures:
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            launch = capture(launch, self._pool)
        self.launches[shape] = launch

    def _inputs_of(self, shape: _Shape) -> Inputs:
        key = shape.num_rows, shape.num_columns
        if key not in self._inputs:
            layers = self.layers
            hidden_size = None if layers.is_first else layers.hidden_size
            self._inputs[key] = Inputs(*key, layers.spec, hidden_size)
        return self._inputs[key]

    def _launch_of(self, shape: _Shape) -> Callable[[], RunnerOutput]:
        # Must not refer to ``self``: the cycle would delay freeing the graphs' memory.
        return partial(_launch, self._eager, shape, self._inputs_of(shape))


def _launch(eager: Eager, shape: _Shape, inputs: Inputs) -> RunnerOutput:
    step = _StaticPlan(shape, inputs, eager)
    return eager.compute(step, inputs.tokens, inputs.positions, 0 if shape.wants_logits else None)


def _cut(output: RunnerOutput, num_rows: int, logits_rows: IntArray) -> RunnerOutput:
    """Copies ``output`` without its padding rows, because the next replay overwrites it."""
    logits = output.logits
    if logits is not None and len(logits_rows) == num_rows:
        logits = logits[:num_rows].clone()
    elif logits is not None:
        logits = logits[to_device(logits_rows, logits.device)]
    return RunnerOutput(
        hidden=output.hidden[:num_rows].clone(),
        logits=logits,
        captured={layer: hidden[:num_rows].clone() for layer, hidden in output.captured.items()},
    )


def capture(launch: Callable[[], T], pool: Any) -> Callable[[], T]:
    """Captures ``launch`` as a CUDA graph and returns its replay.

    ``launch`` reads and writes tensors at fixed addresses. It runs twice before the capture, on a
    side stream, because libraries initialise themselves in their first calls, and must write the
    same values every time. Graphs that share a ``pool`` (``torch.cuda.graph_pool_handle``)
    overwrite each other's outputs: copy those of a replay before the next one.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            launch()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        # Thread-local, because other threads (such as NCCL's) may use the device meanwhile.
        # Torch's own stream would be on the device of the process's first capture.
        with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
            outputs = launch()
    except RuntimeError as error:
        cause = error.__context__ or error  # ending an aborted capture raises a second error
        reason = str(cause).splitlines()[0]
        raise UserError(
            f"model.graphs=cuda cannot capture a pass of this model ({reason}):"
            " its forward may wait for the device, or memory is short; use model.graphs=off"
        ) from error

    def replay() -> T:
        graph.replay()
        return outputs

    return replay
