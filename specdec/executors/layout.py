from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Annotated, Literal

from pydantic import Field

from specdec.clocks import CONTROLLER
from specdec.errors import UserError
from specdec.executors.models import ModelPair
from specdec.executors.stage import split_layers
from specdec.parts.fields import Count, validated
from specdec.types import ExecutorPlan, Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayout:
    """Assigns the target's and the draft's layers to devices.

    Attributes:
        stages: number of pipeline stages; each takes one step.
        groups: number of devices in each stage, which work one after the other within a step
            (PipeDec's G); None: one device each.
        balanced: whether stages are balanced by cost, output head included, not by layers.
        degree: tensor-parallel degree of every stage.
        draft_degree: tensor-parallel degree of the draft; the controller's device is its first.
        shared: whether the draft's further devices are the target's; both then work in turns.
    """

    stages: int
    groups: tuple[int, ...] | None = None
    balanced: bool = False
    degree: int = 1
    draft_degree: int = 1
    shared: bool = False

    def __post_init__(self) -> None:
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
        """Number of layer ranges per stage; each range is on ``degree`` devices."""
        return self.groups or (1,) * self.stages

    @property
    def num_devices(self) -> int:
        return sum(self.devices) * self.degree


@validated
@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """Keys of the configuration ``executor=pipeline``; defaults as in its YAML, except ``stages``.

    Attributes:
        stages: number of stages; None: ceil(layers / layers before the early exit) (PPSD 4.1).
        groups: number of devices of each stage, which work one after another; None: one each.
        shared: whether the draft runs on the target's devices.
        split: "balanced" includes the output head's cost, "even" counts layers only.
        target_degree, draft_degree: tensor-parallel degrees; None: one device.
        transport: "distributed" runs every device in a separate process.
        lock_step: a step ends when its slowest stage has finished; False: stages wait only for what
            they receive (PPSD Algorithm 1), in simulated time, or in processes for a source of
            early exits without hidden states or tensor parallelism; else it has no effect.
        timeout_s: a distributed run fails after this many seconds without progress of any rank.
    """

    stages: Count | None = None
    groups: Annotated[list[Count], Field(min_length=1)] | None = None
    split: Literal["even", "balanced"] = "even"
    target_degree: Count | None = None
    draft_degree: Count | None = None
    shared: bool = False
    lock_step: bool = True
    transport: Literal["in_process", "distributed"] = "in_process"
    timeout_s: Annotated[float, Field(ge=2, lt=1e6)] = 60.0

    def layout(self, default_stages: int) -> StageLayout:
        """Returns the layout, with ``default_stages`` in place of ``stages=None``."""
        return StageLayout(
            stages=self.stages or default_stages,
            groups=None if self.groups is None else tuple(self.groups),
            balanced=self.split == "balanced",
            degree=self.target_degree or 1,
            draft_degree=self.draft_degree or 1,
            shared=self.shared,
        )


@dataclass(frozen=True, kw_only=True)
class PipelinePlan(ExecutorPlan):
    """The plan of a pipeline, made before models are loaded; targets that work at the same time
    need different values of ``group_number``.
    """

    layout: StageLayout
    distributed: bool = False
    lock_step: bool = True
    group_number: int = 0

    @staticmethod
    def of(models: ModelPair, layout: StageLayout, *, distributed: bool = False) -> PipelinePlan:
        others = dict(models.weight_bytes)
        target_bytes = others.pop("target")
        draft_bytes = others.pop("draft", 0)
        bounds = layer_bounds(models, layout)
        layers = models.num_layers + models.head_cost
        shares = [last - first for first, last in bounds]
        sizes: list[float] = [*shares[:-1], shares[-1] + models.head_cost]
        per_rank = [round(target_bytes * size / layers / layout.degree) for size in sizes]
        target = Placement(
            ranks=tuple(range(1, layout.num_devices + 1)),
            weight_bytes=tuple(size for size in per_rank for _ in range(layout.degree)),
            stages=layout.stages,
            degree=layout.degree,
        )
        first = 1 if layout.shared else layout.num_devices + 1
        draft = Placement(
            ranks=(CONTROLLER, *range(first, first + layout.draft_degree - 1)),
            weight_bytes=(round(draft_bytes / layout.draft_degree),) * layout.draft_degree,
            degree=layout.draft_degree,
        )
        return PipelinePlan(
            latency=layout.stages,
            in_flight=layout.stages,
            placements={
                "target": target,
                "draft": draft,
                **{n: Placement(ranks=(CONTROLLER,), weight_bytes=(b,)) for n, b in others.items()},
            },
            layout=layout,
            distributed=distributed,
        )

    def bounds(self, models: ModelPair, exit_layer: int | None) -> list[tuple[int, int]]:
        return layer_bounds(models, self.layout, exit_layer)


@dataclass(frozen=True, kw_only=True)
class EarlyExitPlan(PipelinePlan):
    """The plan of a target on one device whose first layers draft before the others verify. The
    stages of ``layout`` only set the costs of passes on clocks with a latency profile.
    """

    @staticmethod
    def of_stages(models: ModelPair, stages: int) -> EarlyExitPlan:
        layout = StageLayout(stages=stages)
        layer_bounds(models, layout)  # refuses more stages than layers
        target = Placement(ranks=(CONTROLLER,), weight_bytes=(models.weight_bytes["target"],))
        return EarlyExitPlan(latency=1, in_flight=1, placements={"target": target}, layout=layout)


def layer_bounds(
    models: ModelPair, layout: StageLayout, exit_layer: int | None = None
) -> list[tuple[int, int]]:
    """Returns half-open layer ranges, one per device or tensor-parallel group of devices.

    With an exit after E = ``exit_layer`` of N layers and ceil(N / E) ranges, each range has E
    layers and the last one the rest (PPSD 4.1). Otherwise ``split_layers`` decides.
    """
    num_layers, num_devices = models.num_layers, sum(layout.devices)
    if exit_layer and num_devices == ceil(num_layers / exit_layer):
        starts = range(0, num_layers, exit_layer)
        return [(start, min(start + exit_layer, num_layers)) for start in starts]
    head = models.head_cost if layout.balanced else 0.0
    return split_layers(num_layers, num_devices, head_layers=head)
