"""Schedule of a training run: length, phases, step sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from specdec.errors import UserError
from specdec.parts.build import build
from specdec.parts.fields import Count
from specdec.train.model import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One part of a run.

    Attributes:
        until: share of the run at which the phase ends, in (0, 1].
        length: positions per sequence.
        batch: sequences per step, over all processes.
        layers: depth to which the model is grown at the start of the phase, a multiple of the
            previous one; None keeps the depth.
    """

    until: float
    length: Count
    batch: Count
    layers: Count | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """Schedule of a run.

    Attributes:
        phases: in order; the last one's `until` is 1.
        budget_minutes: wall-clock time of the whole run, the sum over sessions; None counts steps.
        max_steps: optimizer steps of the run if budget_minutes is None.
        muon_lr: peak step size of the matrices (Muon, scaled to AdamW's update size).
        adam_lr: peak step size of embeddings and norms (AdamW).
        weight_decay: of both optimizers.
        warmup_steps: steps of linear increase after the start, each growth and each restart.
        decay_from: share of a cycle after which the step size decreases linearly to zero.
        restarts: shares of the run at which a new cycle begins at the peak step size; empty for one
            cycle.
        cycle_rates: share of the peak step size that each cycle reaches; empty for 1.
        clip: largest gradient norm.
        checkpoint_minutes: wall-clock time between checkpoints.
        log_every: steps per row of the loss curve.
        eval_every: rows of the loss curve per held-out measurement.
        eval_length: positions per window of that measurement.
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
        """Checks the values against each other."""
        ends = [phase.until for phase in self.phases]
        if not ends or ends[-1] != 1.0 or ends != sorted(set(ends)) or ends[0] <= 0.0:
            raise UserError(f"phases must end at rising shares, the last at 1.0, got {ends}")
        depths = [phase.layers for phase in self.phases if phase.layers is not None]
        if any(after % before for before, after in pairwise(depths)):
            raise UserError(f"layers of phases must be multiples of those before, got {depths}")
        if self.budget_minutes is None and self.max_steps <= 0:
            raise UserError("plan: give budget_minutes or max_steps")
        if list(self.restarts) != sorted(set(self.restarts)) or not all(
            0.0 < share < 1.0 for share in self.restarts
        ):
            raise UserError(f"restarts must rise within (0, 1), got {self.restarts}")
        if self.cycle_rates and len(self.cycle_rates) != len(self.restarts) + 1:
            raise UserError(
                f"{len(self.restarts) + 1} cycles need as many cycle_rates, got {self.cycle_rates}"
            )

    @staticmethod
    def of(values: Mapping[str, Any], where: str = "plan") -> RunPlan:
        """Builds a plan from plain values.

        Args:
            values: the configuration.
            where: its key, for messages.

        Raises:
            UserError: an unknown or missing key, or a value out of range.
        """
        series = {name: tuple(values.get(name) or ()) for name in ("restarts", "cycle_rates")}
        phases = tuple(build(Phase, phase, f"{where}.phases") for phase in values.get("phases", ()))
        rest = {key: value for key, value in {**values, **series}.items() if key != "phases"}
        return build(RunPlan, rest, where, phases=phases)

    def check(self, shape: ModelShape) -> None:
        """Checks a model's sizes against the phases.

        Raises:
            UserError: the model cannot be grown to a phase's depth, or has too few positions.
        """
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
        """Phase at a progress in [0, 1]."""
        return next((p for p in self.phases if progress < p.until), self.phases[-1])

    def cycle_at(self, progress: float) -> int:
        """Number of restarts before a progress in [0, 1]."""
        return sum(progress >= start for start in self.restarts)

    def rate_at(self, progress: float, steps_since_growth: int) -> float:
        """Share of the peak step size, in [0, 1].

        Args:
            progress: share of the run, in [0, 1].
            steps_since_growth: steps since the start, the last growth or the last restart.
        """
        warmup = min(1.0, (steps_since_growth + 1) / max(1, self.warmup_steps))
        starts, cycle = [0.0, *self.restarts, 1.0], self.cycle_at(progress)
        start, end = starts[cycle], starts[cycle + 1]
        decay = (end - progress) / max(1e-9, (end - start) * (1.0 - self.decay_from))
        peak = self.cycle_rates[cycle] if self.cycle_rates else 1.0
        return peak * warmup * max(0.0, min(1.0, decay))
