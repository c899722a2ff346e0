"""Builds the executor of early exits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from specdec.clocks import Clock
from specdec.clocks.meter import Meter
from specdec.errors import UserError
from specdec.executors.answerer import Answerer
from specdec.executors.early_exit import EarlyExitExecutor, ExitFront, Segment
from specdec.executors.exits import paged

if TYPE_CHECKING:
    from specdec.pairs import ModelPair


def build_front(
    pair: ModelPair,
    layers: Sequence[int],
    bounds: Sequence[tuple[int, int]],
    meter: Meter,
    clock: Clock,
) -> ExitFront:
    """The target's layers before the last exit, with the exit heads.

    Args:
        pair: the models.
        layers: number of layers before each exit.
        bounds: (first, last) layers of each stage that a profile charges.
        meter, clock: of the run.
    """
    segments = [
        Segment(
            stage=pair.exit_stage(start, layer, meter, (layer,)),
            layer=layer,
            stages=sum(first < layer and last > start for first, last in bounds),
        )
        for start, layer in pairwise([0, *layers])
    ]
    return ExitFront(segments=segments, clock=clock)


def build_early_exit(
    *,
    front: ExitFront | None,
    pair: ModelPair,
    bounds: Sequence[tuple[int, int]],
    answerer: Answerer,
    meter: Meter,
    clock: Clock,
    blocks: tuple[int | None, int] = (None, 0),
) -> EarlyExitExecutor:
    """The executor that verifies drafts of ``front``.

    Args:
        front: shared with the source; None if the source does not use it.
        pair, bounds, meter, clock: as for ``build_front``.
        answerer: turns logits into answers.
        blocks: number of blocks of each paged cache (None: not paged), and tokens per block.

    Raises:
        UserError: no ``front``.
    """
    if front is None:
        raise UserError(
            "executor=early_exit verifies drafts of the target's first layers: use it with"
            " source=early_exit, or choose executor=local or executor=pipeline"
        )
    num_blocks, block_tokens = blocks
    if num_blocks is not None:
        front.page(num_blocks, block_tokens)
    layer = front.layers[-1]
    return EarlyExitExecutor(
        front=front,
        rest=paged(pair.stage(layer, pair.num_layers, meter), *blocks),
        answerer=answerer,
        clock=clock,
        stages=sum(last > layer for _, last in bounds),
    )
