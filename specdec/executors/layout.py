"""The placement of the target's layers on pipeline stages and devices."""

from __future__ import annotations

from dataclasses import dataclass


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

    @property
    def devices(self) -> tuple[int, ...]:
        """Layer ranges per stage; each is on one device, or on ``degree`` of them."""
        return self.groups or (1,) * self.stages

    @property
    def num_devices(self) -> int:
        """Devices of the target."""
        return sum(self.devices) * self.degree
