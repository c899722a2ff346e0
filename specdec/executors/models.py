"""The part of a model pair's interface that executors use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeAlias

from specdec.clocks.meter import Meter
from specdec.executors.answerer import Answerer
from specdec.executors.exits import ExitStage
from specdec.executors.stage import Stage
from specdec.sampling.keyed_draws import KeyedDraws
from specdec.types import HiddenName, Needs

Blocks: TypeAlias = tuple[int | None, int]
"""Blocks of each stage's paged cache (None: caches are not paged), and tokens per block."""


class OverRanks(Protocol):
    """Runs the stages of a pipeline on processes; the runtime object ``over_ranks``."""

    def __call__(
        self, plan: Any, needs: Needs, *, bounds: Sequence[tuple[int, int]], exits: Sequence[int]
    ) -> Any:
        """Starts or joins the ranks.

        Args:
            plan: a ``PipelinePlan``.
            needs: of the parts.
            bounds: half-open layer ranges of the devices.
            exits: number of layers before each early exit.

        Returns:
            An ``Executor``.
        """
        ...


class PlannedModels(Protocol):
    """The models as ``plan`` of an executor sees them: sizes, no weights.

    Optional attributes (default in parentheses):

    shared_bytes ({}): name of a model -> bytes among its ``weight_bytes`` that a device with the
        whole target has already (the matrices of the target that an EAGLE head uses).
    """

    @property
    def num_layers(self) -> int:
        """Layers of the target."""
        ...

    @property
    def head_cost(self) -> float:
        """Cost of the output head in layers: its number of weights over that of a layer."""
        ...

    @property
    def weight_bytes(self) -> Mapping[str, int]:
        """Name of each model ("target", "draft", "middle") -> bytes of its weights."""
        ...

    @property
    def exit_layer(self) -> int:
        """Number of layers before the early exit.

        Raises:
            UserError: the pair has no early exit.
        """
        ...


class TargetModels(PlannedModels, Protocol):
    """The target as ``build`` of an executor sees it."""

    def stage(
        self, first: int, last: int, meter: Meter, *, capture: Sequence[HiddenName] = ()
    ) -> Stage:
        """Target layers ``first`` .. ``last`` (exclusive).

        Args:
            first, last: layers of the slice.
            meter: counts the passes.
            capture: hidden states, of layers of the slice, that every pass returns.
        """
        ...

    def exit_stage(self, first: int, last: int, meter: Meter, exits: Sequence[int]) -> ExitStage:
        """Target layers ``first`` .. ``last`` with exit heads.

        Args:
            first, last, meter: as for ``stage``.
            exits: number of layers before each exit.
        """
        ...

    def answerer(self, *, draws: KeyedDraws, needs_probs: bool) -> Answerer:
        """Turns the target's logits into answers.

        Args:
            draws: of the run.
            needs_probs: whether answers carry the whole target distribution.
        """
        ...


def deliverable(needs: Needs, num_layers: int, *, exits: bool = False) -> Needs:
    """``needs`` without hidden states that the target's stages do not give.

    They give the residual stream of their layers and the last one's state after the final norm;
    stages with exit heads give none.
    """

    def given(names: Sequence[HiddenName]) -> tuple[HiddenName, ...]:
        last = num_layers - 1
        inside = (n for n in names if n.layer == last or (0 <= n.layer < last and not n.normed))
        return () if exits else tuple(inside)

    return replace(needs, hidden=given(needs.hidden), early_hidden=given(needs.early_hidden))
