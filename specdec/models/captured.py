"""Captured forward passes: fixed buffers and one CUDA graph per shape (SwiftSpec 4).

A graph reads and writes tensors at fixed addresses with fixed shapes, so
- a request's keys and values are stored in an arena, which later requests reuse;
- the rows of a pass are padded to one of a few counts, its masks to one of a few widths;
- tokens, positions, slots, lengths and masks are sent to the device in one copy.
Padding rows repeat the last row and write to a spare slot that no row sees. With
``model.graphs=replay`` the same buffers and padding are used without graphs, on any device.

Before a timed run, shapes with fewer rows and shorter contexts than those that have occurred are
captured too, so that a shape occurs within it for the first time only if it is larger than all
before.

Shape letters: D head size, C slots of an arena, R (padded) rows, A rows whose logits are computed,
M columns of the mask, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.attention.backends import Kernel, Visibility, dense_attention, folded_heads
from specdec.attention.kv_cache import Rows
from specdec.attention.kv_storage import CacheSpec
from specdec.attention.tree_attention import ScoreOptions, Step
from specdec.device import to_device
from specdec.kernels.graphs import (
    ROW_COUNTS,
    Graphs,
    Launches,
    device_guard,
    observe_timed_runs,
    round_up,
    smaller,
)
from specdec.models.captured_buffers import LEAST_CONTEXT, Arena, Arenas, Inputs
from specdec.types import HiddenName, IntArray

COLUMN_COUNTS = (64, 256, 1024)
"""Mask widths: tree entries that rows may see; a pass with more runs uncaptured."""

_MAX_REQUESTS = 4  # per captured pass; more run in one packed, uncaptured pass


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerOutput:
    """Outputs of one pass.

    Attributes:
        hidden: [sum R, E], after the last layer of the slice and before the final norm: the next
            stage's input.
        logits: [A, V], one row per requested row; None if none were requested, or if the slice is
            not the last.
        captured: name -> [sum R, E], the states that the runner captures.
    """

    hidden: Tensor
    logits: Tensor | None = None
    captured: Mapping[HiddenName, Tensor] = field(default_factory=dict)


class StaticStep(Step):
    """The plan of a pass over static buffers."""

    def __init__(
        self, *, inputs: Inputs, arena: Arena, context: int, first_layer: int, kernel: Kernel | None
    ) -> None:
        """Prepares masks from the inputs' buffers.

        Args:
            inputs: buffers, filled before every replay.
            arena: the request's.
            context: number of slots that attention reads.
            first_layer: global index of the slice's first layer.
            kernel: used by layers without windows and soft caps; None: dense attention.
        """
        super().__init__(first_layer=first_layer, hidden=inputs.hidden)
        self._kernel = kernel
        self._slots = inputs.slots
        self._layers = arena.layers.unbind(0)
        self._context = context
        self._visibility = Visibility(
            lengths=inputs.lengths,
            visible=inputs.visible,
            num_slots=context,
            dtype=arena.layers.dtype,
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
            folds = folded_heads(query, keys) if softcap is None else 1
            mask = self._visibility.mask(window, folds)
            output = dense_attention(query, keys, values, mask, scaling, softcap)
        return output.transpose(1, 2)


Compute = Callable[[StaticStep, Tensor, Tensor, bool], RunnerOutput]
"""The model's forward: (step, tokens int64[R], positions int64[R], whether to compute logits)."""


class _Shape(NamedTuple):
    """What a graph is captured for.

    Attributes:
        arena: of the request.
        num_rows, num_columns: R, M.
        context: number of slots that attention reads.
        wants_logits: whether logits are computed.
    """

    arena: Arena
    num_rows: int
    num_columns: int
    context: int
    wants_logits: bool


@dataclass(kw_only=True, eq=False)
class StaticPasses:
    """Runs passes of few rows over static buffers, one graph per shape.

    Attributes:
        spec: shape and type of the runner's caches.
        graphs: ``CUDA`` or ``REPLAY``.
        compute: the model's forward.
        first_layer: global index of the slice's first layer.
        hidden_size: E for a slice that is not the first; None for the first.
        kernel: see ``StaticStep``.
        reads_lengths: whether the kernel reads the context's length from device memory, so that one
            graph works for every length.
        replays: number of passes that ran over static buffers.
        arenas: key/value memory of the caches of captured passes.
    """

    spec: CacheSpec
    graphs: Graphs
    compute: Compute
    first_layer: int
    hidden_size: int | None
    kernel: Kernel | None = None
    reads_lengths: bool = False
    replays: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.arenas = Arenas(self.spec)
        self._inputs: dict[tuple[int, int], Inputs] = {}
        self._passes = Launches[RunnerOutput](captures=self.graphs is Graphs.CUDA)
        observe_timed_runs(self)

    @property
    def num_captured(self) -> int:
        """Number of captured graphs; without graphs, of shapes used so far."""
        return len(self._passes)

    def serves(self, rows: Sequence[Rows]) -> bool:
        """Whether the pass has few enough rows and requests, whose caches all lie in arenas."""
        parts = [part for part in rows if len(part)]
        return 0 < len(parts) <= _MAX_REQUESTS and all(
            len(part) <= ROW_COUNTS[-1]
            and part.visible.shape[1] <= COLUMN_COUNTS[-1]
            and self.arenas.of(part.cache) is not None
            for part in parts
        )

    def run(
        self,
        rows: Sequence[Rows],
        hidden: Tensor | None,
        logits_rows: IntArray | None,
        wants_logits: bool,
    ) -> RunnerOutput:
        """One replay per request, of all logits; returns copies of the outputs, without padding.

        Args:
            rows: a pass for which ``serves`` is true.
            hidden, logits_rows: as for ``ModelRunner.forward``.
            wants_logits: whether to compute logits.
        """
        hidden = None if hidden is None else hidden.to(self.spec.device)
        outputs, start = [], 0
        for part in rows:
            if len(part):
                stop = start + len(part)
                part_hidden = None if hidden is None else hidden[start:stop]
                outputs.append(_cut(self._replay(part, part_hidden, wants_logits), len(part)))
                start = stop
        output = outputs[0] if len(outputs) == 1 else concatenate(outputs)
        if logits_rows is None or output.logits is None:
            return output
        if np.array_equal(logits_rows, np.arange(len(output.logits))):
            return output
        index = to_device(logits_rows, self.spec.device)
        return replace(output, logits=output.logits[index])

    def _replay(self, rows: Rows, hidden: Tensor | None, wants_logits: bool) -> RunnerOutput:
        num_rows = round_up(len(rows), ROW_COUNTS)
        num_columns = round_up(rows.visible.shape[1], COLUMN_COUNTS)
        arena = self.arenas.of(rows.cache)
        assert arena is not None, "the cache is not in an arena"
        context = arena.spare
        if not self.reads_lengths:
            context = min(context, max(LEAST_CONTEXT, 1 << (rows.end - 1).bit_length()))
        shape = _Shape(arena, num_rows, num_columns, context, wants_logits)
        self._inputs_of(shape).fill(rows, arena.spare, hidden)
        self.replays += 1
        return self._passes.run(shape, partial(self._make_launch, shape))

    def begin_timed(self) -> None:
        """Captures all shapes up to those that have occurred."""
        with torch.inference_mode(), device_guard(self.spec.device):
            for occurred in self._passes.take_occurred():
                contexts = [occurred.context]
                while not self.reads_lengths and contexts[-1] > LEAST_CONTEXT:
                    contexts.append(contexts[-1] // 2)
                for num_rows in smaller(occurred.num_rows, ROW_COUNTS):
                    for context in contexts:
                        shape = occurred._replace(num_rows=num_rows, context=context)
                        self._inputs_of(shape).idle(shape.arena.spare)
                        self._passes.prepare(shape, partial(self._make_launch, shape))

    def end_timed(self) -> None:
        """Nothing to do."""

    def _inputs_of(self, shape: _Shape) -> Inputs:
        key = shape.num_rows, shape.num_columns
        if key not in self._inputs:
            self._inputs[key] = Inputs(*key, self.spec, self.hidden_size)
        return self._inputs[key]

    def _make_launch(self, shape: _Shape) -> Callable[[], RunnerOutput]:
        inputs = self._inputs_of(shape)
        step = partial(
            StaticStep,
            inputs=inputs,
            arena=shape.arena,
            context=shape.context,
            first_layer=self.first_layer,
            kernel=self.kernel,
        )
        # Must not refer to ``self``, which refers to it.
        return partial(_launch, self.compute, step, inputs, shape.wants_logits)


def _launch(
    compute: Compute, step: Callable[[], StaticStep], inputs: Inputs, wants_logits: bool
) -> RunnerOutput:
    return compute(step(), inputs.tokens, inputs.positions, wants_logits)


def _cut(output: RunnerOutput, num_rows: int) -> RunnerOutput:
    """Copies of the first rows; the next replay overwrites the static outputs."""
    return RunnerOutput(
        hidden=output.hidden[:num_rows].clone(),
        logits=None if output.logits is None else output.logits[:num_rows].clone(),
        captured={layer: hidden[:num_rows].clone() for layer, hidden in output.captured.items()},
    )


def concatenate(parts: Sequence[RunnerOutput]) -> RunnerOutput:
    """The outputs of consecutive rows as one."""
    logits = [part.logits for part in parts if part.logits is not None]
    layers = parts[0].captured
    return RunnerOutput(
        hidden=torch.cat([part.hidden for part in parts]),
        logits=torch.cat(logits) if logits else None,
        captured={layer: torch.cat([p.captured[layer] for p in parts]) for layer in layers},
    )
