"""How the target's layers are placed on pipeline stages and devices."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayout:
    """How the target's layers are laid over devices.

    Attributes:
        stages: steps that a batch takes through the pipeline.
        groups: devices per stage, which work one after the other within a step (PipeDec's G); None:
            one each.
        balanced: whether stages are balanced with the output head's cost, or by layers alone.
        degree: devices that share every layer of a stage (tensor parallelism).
        draft_degree: devices that share every layer of the draft, the controller's the first.
        shared: whether the draft's devices are the target's, used in turns.
        after_drafting: the stages before an early exit draft, and the others verify once they have
            done so (EESD), instead of at the same time.
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
        """Ranges of layers per stage, a device each, or ``degree`` of them."""
        return self.groups or (1,) * self.stages

    @property
    def num_devices(self) -> int:
        """Devices of the target."""
        return sum(self.devices) * self.degree
