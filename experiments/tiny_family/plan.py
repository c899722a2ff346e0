from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

from experiments.tiny_family.model import ModelShape
from specdec.errors import UserError
from specdec.parts.build import check_values
from specdec.parts.fields import Count

_T = TypeVar("_T")


def build(make: Callable[..., _T], values: Mapping[str, Any], where: str = "", **given: Any) -> _T:
    """Returns ``make(**values, **given)`` after ``check_values``."""
    check_values(make, values, where, given=given.keys())
    return make(**values, **given)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One part of a run.

    ``layers`` is the depth to which the model is grown at the start of the phase, a multiple of the
    previous one; None leaves the depth.
    """

    until: float  # share of the run at which the phase ends, in (0, 1]
    length: Count  # positions per sequence
    batch: Count  # sequences per step, over all processes
    layers: Count | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """Schedule of a run; target.yaml describes the keys.

    Peak step sizes are ``muon_lr`` for matrices (Muon, scaled to AdamW's update size) and
    ``adam_lr`` for embeddings and norms (AdamW). Empty ``restarts`` mean one cycle, empty
    ``cycle_rates`` the full rate in each cycle.
    """

    phases: tuple[Phase, ...]
    budget_minutes: float | None = None
    max_steps: int = 0
    muon_lr: float = 4e-3
    adam_lr: float = 4e-3
    weight_decay: float = 0.05
    warmup_steps: int = 40
    decay_from: float = 0.45
    restarts: tuple[float, ...] = ()
    cycle_rates: tuple[float, ...] = ()
    clip: float = 1.0
    checkpoint_minutes: float = 4.0
    log_every: Count = 50
    eval_every: Count = 4
    eval_length: Count = 256

    def __post_init__(self) -> None:
        ends = [phase.until for phase in self.phases]
        if not ends or ends[-1] != 1.0 or ends != sorted(set(ends)) or ends[0] <= 0.0:
            raise UserError(f"phases must end at rising shares, the last at 1.0, got {ends}")
        depths = [phase.layers for phase in self.phases if phase.layers is not None]
        if any(after % before for before, after in pairwise(depths)):
            raise UserError(f"layers of phases must be multiples of those before, got {depths}")
        if self.budget_minutes is None and self.max_steps <= 0:
            raise UserError("plan: give budget_minutes or max_steps")
        cycles = [0.0, *self.restarts, 1.0]
        if cycles != sorted(set(cycles)):
            raise UserError(f"restarts must rise within (0, 1), got {self.restarts}")
        count, rates = len(self.restarts) + 1, self.cycle_rates
        if rates and len(rates) != count:
            raise UserError(f"{count} cycles need as many cycle_rates, got {rates}")

    @staticmethod
    def of(values: Mapping[str, Any], where: str = "plan") -> RunPlan:
        series = {name: tuple(values.get(name) or ()) for name in ("restarts", "cycle_rates")}
        phases = tuple(build(Phase, phase, f"{where}.phases") for phase in values.get("phases", ()))
        rest = {key: value for key, value in {**values, **series}.items() if key != "phases"}
        return build(RunPlan, rest, where, phases=phases)

    def check(self, shape: ModelShape) -> None:
        for phase in self.phases:
            if (phase.layers or shape.num_layers) % shape.num_layers:
                raise UserError(
                    f"a model of {shape.num_layers} layers cannot be grown to"
                    f" layers={phase.layers}: give a multiple, or leave `layers` out"
                )
            if phase.length > shape.max_positions:
                raise UserError(
                    f"length={phase.length} is beyond the model's {shape.max_positions} positions"
                )

    def phase_at(self, progress: float) -> Phase:
        return next((p for p in self.phases if progress < p.until), self.phases[-1])

    def cycle_at(self, progress: float) -> int:
        return sum(progress >= start for start in self.restarts)

    def rate_at(self, progress: float, steps_since_growth: int) -> float:
        """Returns the share of the peak step size, in [0, 1], at a progress in [0, 1].

        ``steps_since_growth`` also counts from the start and from a restart.
        """
        warmup = min(1.0, (steps_since_growth + 1) / max(1, self.warmup_steps))
        cycle = self.cycle_at(progress)
        start, end = [0.0, *self.restarts, 1.0][cycle : cycle + 2]
        decay = (end - progress) / max(1e-9, (end - start) * (1.0 - self.decay_from))
        peak = self.cycle_rates[cycle] if self.cycle_rates else 1.0
        return peak * warmup * max(0.0, min(1.0, decay))
