"""Puts early-exit executors together, and refuses parts that cannot wait for exits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specdec.clocks import Clock
from specdec.distributed.plan import ExitPlan, RankPlan
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


def exit_plan(needs: Needs, ranks: Sequence[RankPlan], layer: int | None) -> ExitPlan | None:
    """Which rank of a pipeline hands out the exits that ``needs`` asks for; None without an exit.

    Of ranks that share the layers with the exit, it is the last, as for answers.
    """
    if layer is None:
        return None
    found = [i for i, r in enumerate(ranks, 1) if r.layers[0] < layer <= r.layers[1]]
    return ExitPlan(rank=found[-1], candidates=needs.exits, sample=needs.draft_probs)
