"""Puts early exits together."""

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
    """The layers before a pair's last exit, with the heads.

    Args:
        pair: with an exit layer.
        layers: before each exit.
        bounds: (first, last) layer of each priced stage.
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
    """The executor that verifies what ``front`` has drafted.

    Args:
        front: shared with the source; None where no source drafts with one.
        pair, bounds, meter, clock: as for ``build_front``.
        answerer: turns logits into answers.
        blocks: of each paged cache, and tokens of a block; None where caches are not paged.

    Raises:
        UserError: no source drafts with a front.
    """
    if front is None:
        raise UserError(
            "executor=early_exit verifies what the target's own first layers have drafted: use"
            " it with source=early_exit, or choose executor=local or executor=pipeline"
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
