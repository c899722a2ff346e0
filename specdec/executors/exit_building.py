"""Puts early-exit executors together, and refuses parts that cannot wait for exits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specdec.clocks import Clock
from specdec.errors import UserError
from specdec.executors.answering import Answerer
from specdec.executors.early_exit import EarlyExitExecutor, ExitFront
from specdec.metrics.meter import Meter
from specdec.types import Needs

if TYPE_CHECKING:
    from specdec.interfaces import Executor, TokenSource, TreePolicy
    from specdec.pairs import ModelPair


def build_front(
    pair: ModelPair, bounds: Sequence[tuple[int, int]], meter: Meter, clock: Clock
) -> ExitFront:
    """The layers before a pair's exit, with the head.

    Args:
        pair: with an exit layer.
        bounds: (first, last) layer of each priced stage.
        meter, clock: of the run.
    """
    layer = pair.exit_layer
    before = sum(first < layer for first, _ in bounds)
    return ExitFront(stage=pair.exit_stage(0, layer, meter), clock=clock, stages=before)


def build_early_exit(
    *,
    front: ExitFront | None,
    pair: ModelPair,
    bounds: Sequence[tuple[int, int]],
    answerer: Answerer,
    meter: Meter,
    clock: Clock,
) -> EarlyExitExecutor:
    """The executor that verifies what ``front`` has drafted.

    Raises:
        UserError: no source drafts with a front.
    """
    if front is None:
        raise UserError(
            "executor=early_exit verifies what the target's own first layers have drafted: use"
            " it with source=early_exit, or choose executor=local or executor=pipeline"
        )
    layer = pair.exit_layer
    return EarlyExitExecutor(
        front=front,
        rest=pair.stage(layer, pair.num_layers, meter),
        answerer=answerer,
        clock=clock,
        stages=sum(last > layer for _, last in bounds),
    )


def check_exits(source: TokenSource, policy: TreePolicy, executor: Executor) -> None:
    """Refuses a policy that cannot wait for exits, and an executor that has none.

    Raises:
        UserError: with the reason and the remedy.
    """
    if not source.needs.exits:
        return
    if not getattr(policy, "follows_exits", False):
        raise UserError(
            f"{type(policy).__name__} drafts before it submits, but in a pipeline a token's exit"
            " comes after it was submitted: use policy=ppsd or policy=ppsd_tree, or draft first"
            " and verify then with executor=early_exit"
        )
    if executor.latency == 1:
        raise UserError(
            "source=early_exit needs executor=early_exit, which drafts and then verifies, or"
            " executor=pipeline with at least 2 stages, which verifies while drafting"
        )


def refuse_ranks(needs: Needs) -> None:
    """Refuses exits on stages in processes of their own.

    Raises:
        UserError: if a part needs exits.
    """
    if needs.exits:
        raise UserError(
            "source=early_exit with executor.transport=distributed: ranks do not send exits yet;"
            " use executor.transport=in_process"
        )
