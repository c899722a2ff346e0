"""The placement of the target's layers on pipeline stages and devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from specdec.errors import UserError
from specdec.parts.fields import Count, validated


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayout:
    """Placement of the target's and the draft's layers on devices.

    Attributes:
        stages: number of pipeline stages, each one step.
        groups: devices per stage, which run one after the other within a step (PipeDec's G); None:
            one each.
        balanced: balance the stages including the output head's cost, instead of by layers alone.
        degree: tensor-parallel degree of every stage.
        draft_degree: tensor-parallel degree of the draft; the controller is its first device.
        shared: the draft uses the target's devices, in turns.
        after_drafting: the stages before an early exit draft first, then the others verify (EESD),
            instead of both in parallel.
    """

    stages: int
    groups: tuple[int, ...] | None = None
    balanced: bool = False
    degree: int = 1
    draft_degree: int = 1
    shared: bool = False
    after_drafting: bool = False

    def __post_init__(self) -> None:
        """Raises ``UserError`` for values that do not fit together."""
        groups = None if self.groups is None else list(self.groups)
        if groups and self.degree > 1:
            raise UserError(
                f"executor.groups={groups} prices several devices per stage one after another, and"
                f" executor.target_degree={self.degree} makes them share every layer: set one of"
                " the two"
            )
        if groups and len(groups) != self.stages:
            raise UserError(
                f"executor.groups={groups} names {len(groups)} stages, but"
                f" executor.stages={self.stages}: give one number of devices per stage"
            )
        if self.shared and self.draft_degree > self.stages * self.degree:
            raise UserError(
                f"executor.shared=true puts the draft on the target's {self.stages * self.degree}"
                f" devices, fewer than executor.draft_degree={self.draft_degree}: lower it"
            )

    @property
    def devices(self) -> tuple[int, ...]:
        """Layer ranges per stage; each is on one device, or on ``degree`` of them."""
        return self.groups or (1,) * self.stages

    @property
    def num_devices(self) -> int:
        """Devices of the target."""
        return sum(self.devices) * self.degree


@validated
@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """Keys of ``executor=pipeline``, with the defaults of its YAML.

    Attributes:
        stages: number of stages; None: ceil(layers / exit layer) (PPSD 4.1).
        groups, shared: see ``StageLayout``.
        split: "balanced" counts the output head's cost, "even" counts layers alone.
        target_degree, draft_degree: tensor-parallel degrees; None: one device.
        transport: "distributed" runs every device in a separate process.
        timeout_s: a distributed run fails when no rank has made progress for this long.
    """

    stages: Count | None = None
    groups: Annotated[list[Count], Field(min_length=1)] | None = None
    split: Literal["even", "balanced"] = "even"
    target_degree: Count | None = None
    draft_degree: Count | None = None
    shared: bool = False
    transport: Literal["in_process", "distributed"] = "in_process"
    timeout_s: Annotated[float, Field(ge=1, lt=1e6)] = 60.0

    def layout(self, default_stages: int) -> StageLayout:
        """The layout; ``default_stages`` is the number of stages where ``stages`` is None.

        Raises:
            UserError: options that do not fit together.
        """
        return StageLayout(
            stages=self.stages or default_stages,
            groups=None if self.groups is None else tuple(self.groups),
            balanced=self.split == "balanced",
            degree=self.target_degree or 1,
            draft_degree=self.draft_degree or 1,
            shared=self.shared,
        )
