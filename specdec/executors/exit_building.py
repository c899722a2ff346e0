"""Puts early exits together, and refuses parts that cannot wait for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from specdec.clocks import Clock
from specdec.distributed.plan import ExitPlan, RankPlan
from specdec.errors import UserError
from specdec.executors.answering import Answerer
from specdec.executors.early_exit import EarlyExitExecutor, ExitFront, Segment
from specdec.executors.exits import paged
from specdec.metrics.meter import Meter
from specdec.types import Needs

if TYPE_CHECKING:
    from specdec.interfaces import Executor, TokenSource, TreePolicy
    from specdec.pairs import ModelPair


@dataclass(frozen=True, slots=True)
class ExitPlaces:
    """Where a target may exit, for sources that use several exits (PPSD B.3).

    Attributes:
        pair: with an exit layer.
        build: makes the front up to exits; None where stages compute them.
    """

    pair: ModelPair
    build: Callable[[Sequence[int]], ExitFront] | None = None

    def layers(self, further: Sequence[int] | None) -> tuple[int, ...]:
        """Layers before each exit, the model's own first.

        Args:
            further: layers before the others; None for one at twice the depth of the first, or as
                near to it as the target is deep.

        Raises:
            UserError: they do not rise, or are not inside the target.
        """
        first, last = self.pair.exit_layer, self.pair.num_layers - 1
        found = [min(2 * first, last)] if further is None else list(further)
        places = [first, *found]
        if not found or places != sorted(set(places)) or places[-1] > last:
            raise UserError(
                f"source.further_exits={further} must rise from above model.exit_layer={first} to"
                f" at most {last}, the target's layers less one; for one exit use source=early_exit"
            )
        return tuple(places)


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


def check_exits(source: TokenSource, policy: TreePolicy, executor: Executor) -> None:
    """Refuses a policy that cannot wait for exits, and an executor that has none.

    Also several exits in a pipeline under a rejection verifier, whose draws depend on how far the
    draft has come when an answer arrives.

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
    if source.needs.further_exits and getattr(source, "gives_probs", False):
        raise UserError(
            "source=multi_exit in a pipeline waits for exits, so how far the draft has come at"
            " a verdict, and with it the draws of a rejection verifier, would depend on the other"
            " requests: use verifier=match, source=early_exit or executor=early_exit"
        )


def refuse_several(needs: Needs) -> None:
    """Refuses several exits of stages in processes of their own.

    Raises:
        UserError: if a part needs more than one.
    """
    if needs.further_exits:
        raise UserError(
            "source=multi_exit with executor.transport=distributed: ranks send one exit only; use"
            " source=early_exit, or executor.transport=in_process"
        )


def exit_plan(needs: Needs, ranks: Sequence[RankPlan], layer: int | None) -> ExitPlan | None:
    """Which rank of a pipeline hands out the exits that ``needs`` asks for; None without an exit.

    Of ranks that share the layers with the exit, it is the last, as for answers.

    Raises:
        UserError: several exits, of which ranks send one only.
    """
    if layer is None:
        return None
    refuse_several(needs)
    found = [i for i, r in enumerate(ranks, 1) if r.layers[0] < layer <= r.layers[1]]
    return ExitPlan(rank=found[-1], candidates=needs.exits, sample=needs.draft_probs)
