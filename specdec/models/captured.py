"""Captured forwards: passes over fixed buffers, one CUDA graph per shape, replayed as a whole.

SwiftSpec 4 captures the kernels of a pass in a CUDA graph. What a graph reads and writes must lie
at fixed addresses and have fixed shapes, so
- a request's keys and values lie in an arena that outlives it and is used again by later requests;
- the rows of a pass are padded to one of a few counts; its masks to one of a few widths;
- tokens, positions, slots, lengths and masks go to the device in one copy of a few hundred bytes.
Padding rows repeat the last row and write to a spare slot that nobody sees. The same buffers and
paddings are used where passes are replayed without a graph (``replay``), on any device.

Letters: D head size, C slots of an arena, R padded rows, M columns of the mask, E hidden size,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from specdec.attention.backends import Kernel, Seen, dense_attention
from specdec.attention.kv_cache import Rows
from specdec.attention.kv_storage import CacheSpec
from specdec.attention.tree_attention import StepCache, capped_attention
from specdec.device import ROW_COUNTS, Graphs, at_least, captured
from specdec.models.captured_buffers import LEAST_CONTEXT, Arena, Arenas, Inputs

COLUMN_COUNTS = (64, 256, 1024)
"""Widths of masks: tree entries that the rows may see; a pass with more is not captured."""

_MAX_REQUESTS = 4  # more requests in a pass go through one packed, uncaptured pass


@dataclass(frozen=True, slots=True)
class Computed:
    """Static outputs of a pass, overwritten by the next replay.

    Attributes:
        hidden: [R, E] after the last layer.
        logits: [R, V], or None.
        captured: layer -> [R, E].
    """

    hidden: torch.Tensor
    logits: torch.Tensor | None
    captured: dict[int, torch.Tensor]


class Compute(Protocol):
    """The model's forward over a step's rows."""

    def __call__(
        self, step: StaticStep, tokens: torch.Tensor, positions: torch.Tensor, wants_logits: bool
    ) -> Computed: ...


class StaticStep:
    """The plan of a pass over static buffers (see ``specdec.attention.tree_attention.Step``).

    Attributes:
        cache, captured, hidden: see ``AttentionStep``.
    """

    def __init__(
        self, *, inputs: Inputs, arena: Arena, context: int, first_layer: int, kernel: Kernel | None
    ) -> None:
        """Prepares masks from the inputs' buffers.

        Args:
            inputs: filled before every replay.
            arena: of the request.
            context: slots that dense attention looks at.
            first_layer: of the slice.
            kernel: instead of dense attention, where layers have neither windows nor caps.
        """
        self.cache = StepCache(first_layer=first_layer)
        self.captured: dict[int, torch.Tensor] = {}
        self.hidden = inputs.hidden
        self._kernel = kernel
        self._slots = inputs.slots
        self._stored = arena.flat.unbind(0)
        self._context = context
        self._seen = Seen(
            lengths=inputs.lengths,
            visible=inputs.visible(),
            num_slots=context,
            dtype=arena.flat.dtype,
            positions=inputs.positions,
            column_positions=inputs.columns,
        )

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Writes the rows' keys and values and attends; see ``tree_attention``."""
        layer = self.cache.layer
        keys, values = self._stored[2 * layer], self._stored[2 * layer + 1]
        keys.index_copy_(2, self._slots, key)
        values.index_copy_(2, self._slots, value)
        keys, values = keys.narrow(2, 0, self._context), values.narrow(2, 0, self._context)
        if softcap is not None:
            mask = self._seen.mask(window)
            found = capped_attention(query, (keys, values), mask, scaling, softcap)
        elif self._kernel is not None and window is None:
            found = self._kernel(query, keys, values, self._seen, scaling)
        else:
            found = dense_attention(query, keys, values, self._seen.mask(window), scaling)
        return found.transpose(1, 2)


class StaticPasses:
    """Runs passes of few rows over static buffers; see the module.

    Attributes:
        arenas: where the caches of captured passes lie.
        num_captured: graphs (or, without graphs, shapes) so far.
        replays: passes that were replayed; the others ran as ever.
    """

    def __init__(
        self,
        *,
        spec: CacheSpec,
        graphs: Graphs,
        compute: Compute,
        first_layer: int,
        hidden_size: int | None,
        kernel: Kernel | None = None,
        reads_lengths: bool = False,
    ) -> None:
        """Captures nothing yet: each shape is captured when it first occurs.

        Args:
            spec: of the runner's caches.
            graphs: ``CUDA`` or ``REPLAY``.
            compute: the model's forward.
            first_layer: of the slice.
            hidden_size: E for a slice that is not the first; None for the first.
            kernel: see ``StaticStep``.
            reads_lengths: whether the kernel finds the context's length on the device, so that one
                graph serves every length.
        """
        self.arenas = Arenas(spec)
        self.replays = 0
        self._spec = spec
        self._compute = compute
        self._first_layer = first_layer
        self._hidden_size = hidden_size
        self._kernel = kernel
        self._reads_lengths = reads_lengths
        self._captures = graphs is Graphs.CUDA
        self._inputs: dict[tuple[int, int], Inputs] = {}
        self._passes: dict[tuple[Any, ...], Callable[[], Computed]] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._captures else None

    @property
    def num_captured(self) -> int:
        """Graphs, or shapes, so far."""
        return len(self._passes)

    def serves(self, rows: Sequence[Rows]) -> bool:
        """Whether the pass is one of few rows, over few requests that lie in arenas."""
        parts = [part for part in rows if len(part)]
        return 0 < len(parts) <= _MAX_REQUESTS and all(
            len(part) <= ROW_COUNTS[-1]
            and part.visible.shape[1] <= COLUMN_COUNTS[-1]
            and self.arenas.of(part.cache) is not None
            for part in parts
        )

    def run(
        self, rows: Sequence[Rows], hidden: torch.Tensor | None, wants_logits: bool
    ) -> Computed:
        """One replay per request; the outputs are copies, of the rows only.

        Args:
            rows: what ``serves`` agreed to.
            hidden: [sum of rows, E], for a slice that is not the first.
            wants_logits: whether logits are computed.
        """
        found, start = [], 0
        for part in rows:
            if len(part):
                stop = start + len(part)
                entering = None if hidden is None else hidden[start:stop]
                found.append(_cut(self._replay(part, entering, wants_logits), len(part)))
                start = stop
        return found[0] if len(found) == 1 else _joined(found)

    def _replay(self, rows: Rows, hidden: torch.Tensor | None, wants_logits: bool) -> Computed:
        num_rows = at_least(len(rows), ROW_COUNTS)
        num_columns = at_least(rows.visible.shape[1], COLUMN_COUNTS)
        arena = self.arenas.of(rows.cache)
        assert arena is not None, "the cache lies in no arena"
        context = arena.spare
        if not self._reads_lengths:
            context = min(context, max(LEAST_CONTEXT, 1 << (rows.end - 1).bit_length()))
        inputs = self._inputs_of(num_rows, num_columns)
        inputs.fill(rows, arena.spare, hidden)
        key = (id(arena), num_rows, num_columns, context, wants_logits)
        if key not in self._passes:
            self._passes[key] = self._made(inputs, arena, context, wants_logits)
        self.replays += 1
        return self._passes[key]()

    def _inputs_of(self, num_rows: int, num_columns: int) -> Inputs:
        key = (num_rows, num_columns)
        if key not in self._inputs:
            spec, hidden = self._spec, None
            if self._hidden_size is not None:
                shape = (1, num_rows, self._hidden_size)
                hidden = torch.zeros(shape, dtype=spec.dtype, device=spec.device)
            self._inputs[key] = Inputs(num_rows, num_columns, spec.device, hidden)
        return self._inputs[key]

    def _made(
        self, inputs: Inputs, arena: Arena, context: int, wants_logits: bool
    ) -> Callable[[], Computed]:
        compute, first_layer, kernel = self._compute, self._first_layer, self._kernel

        def launch() -> Computed:  # without ``self``, which keeps it
            step = StaticStep(
                inputs=inputs,
                arena=arena,
                context=context,
                first_layer=first_layer,
                kernel=kernel,
            )
            return compute(step, inputs.tokens, inputs.positions, wants_logits)

        return captured(launch, self._pool) if self._captures else launch


def _cut(computed: Computed, num_rows: int) -> Computed:
    """Copies of the first rows: what is static is overwritten by the next replay."""
    return Computed(
        computed.hidden[:num_rows].clone(),
        None if computed.logits is None else computed.logits[:num_rows].clone(),
        {layer: hidden[:num_rows].clone() for layer, hidden in computed.captured.items()},
    )


def _joined(parts: list[Computed]) -> Computed:
    logits = [part.logits for part in parts if part.logits is not None]
    return Computed(
        torch.cat([part.hidden for part in parts]),
        torch.cat(logits) if logits else None,
        {layer: torch.cat([p.captured[layer] for p in parts]) for layer in parts[0].captured},
    )
