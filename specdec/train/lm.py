"""Pre-training: a time-budgeted language-model run that may deepen the model on its way."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.train.model import LanguageModel, ModelShape, grow
from specdec.train.parallel import agreed, average_gradients, rank_and_size
from specdec.train.streams import Mixture

_TABLES = ("embed_tokens.weight", "output.weight")  # one row per token: no matrices to Muon

Report = Callable[[float, str], None]
"""Called with progress in [0, 1] and a line of text."""


def silent(_progress: float, _line: str) -> None:
    """A Report that says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A stretch of the run.

    Attributes:
        until: share of the budget at which it ends, in (0, 1].
        layers: depth; on entry the model is grown to it.
        length: positions per sequence.
        batch: sequences per step.
    """

    until: float
    layers: int
    length: int
    batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """How long, how fast and in which phases.

    Attributes:
        phases: in order; the last one's `until` is 1.
        budget_minutes: wall clock of the whole run, resumed parts added up; None counts steps.
        max_steps: length of the run in optimizer steps where budget_minutes is None.
        muon_lr: peak step size of the matrices (Muon, scaled to AdamW's update size).
        adam_lr: peak step size of embeddings and norms (AdamW).
        weight_decay: of both.
        warmup_steps: linear rise after the start, each growth and each restart.
        decay_from: share of a cycle after which the step size falls linearly to zero.
        restarts: shares of the budget at which a new cycle begins, at the peak step size again;
            without any, the whole run is one cycle.
        cycle_rates: share of the peak step size that each cycle reaches; all of it without any.
        clip: largest gradient norm.
        checkpoint_minutes: time between checkpoints.
        log_every: steps per row of the loss curve.
        eval_every: rows of the loss curve per held-out measurement.
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
    log_every: int = 50
    eval_every: int = 4

    def __post_init__(self) -> None:
        """Checks that the run has an end and that phases cover it."""
        if not self.phases or self.phases[-1].until != 1.0:
            raise ValueError("the last phase must end at 1.0")
        if self.budget_minutes is None and self.max_steps <= 0:
            raise ValueError("give budget_minutes or max_steps")
        if list(self.restarts) != sorted(set(self.restarts)) or not all(
            0.0 < share < 1.0 for share in self.restarts
        ):
            raise ValueError(f"restarts must rise within (0, 1), got {self.restarts}")
        if self.cycle_rates and len(self.cycle_rates) != len(self.restarts) + 1:
            raise ValueError(
                f"{len(self.restarts) + 1} cycles need as many cycle_rates, got {self.cycle_rates}"
            )

    def phase_at(self, progress: float) -> Phase:
        """Phase in force at a progress in [0, 1]."""
        return next((p for p in self.phases if progress < p.until), self.phases[-1])

    def cycle_at(self, progress: float) -> int:
        """Restarts that lie behind a progress in [0, 1]."""
        return sum(progress >= start for start in self.restarts)

    def rate_at(self, progress: float, steps_since_growth: int) -> float:
        """Share of the peak step size, in [0, 1]."""
        warm = min(1.0, (steps_since_growth + 1) / max(1, self.warmup_steps))
        starts, cycle = [0.0, *self.restarts, 1.0], self.cycle_at(progress)
        start, end = starts[cycle], starts[cycle + 1]
        fall = (end - progress) / max(1e-9, (end - start) * (1.0 - self.decay_from))
        peak = self.cycle_rates[cycle] if self.cycle_rates else 1.0
        return peak * warm * max(0.0, min(1.0, fall))


def make_optimizers(model: torch.nn.Module, plan: RunPlan) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, where there are any; AdamW for tables and norms."""
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, weight in model.named_parameters():
        is_matrix = weight.dim() == 2 and not name.endswith(_TABLES)
        (matrices if is_matrix else others).append(weight)
    found: list[torch.optim.Optimizer] = []
    if matrices:
        muon = torch.optim.Muon(
            matrices,
            lr=plan.muon_lr,
            weight_decay=plan.weight_decay,
            momentum=0.95,
            adjust_lr_fn="match_rms_adamw",
        )
        found.append(muon)
    adam = torch.optim.AdamW(
        others, lr=plan.adam_lr, weight_decay=plan.weight_decay, betas=(0.9, 0.98), eps=1e-10
    )
    found.append(adam)
    for optimizer in found:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return found


@torch.no_grad()
def held_out_loss(
    model: LanguageModel, tokens: np.ndarray, length: int = 512, max_windows: int = 0
) -> float:
    """Mean loss in nats per token over non-overlapping windows of a token array.

    Args:
        model: any LanguageModel.
        tokens: one-dimensional ids.
        length: positions per window; the first token of a window is context only.
        max_windows: evenly spaced windows to use; 0 uses all.
    """
    count = (len(tokens) - 1) // length
    windows = np.arange(count) * length
    if max_windows and count > max_windows:
        windows = windows[np.linspace(0, count - 1, max_windows).astype(int)]
    device = model.device
    total = 0.0
    for start in range(0, len(windows), 8):
        rows = [tokens[w : w + length + 1].astype(np.int64) for w in windows[start : start + 8]]
        batch = torch.from_numpy(np.stack(rows)).to(device)
        loss = model.loss(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
        total += float(loss) * len(rows)
    return total / len(windows)


@dataclass(slots=True)
class RunState:
    """Where a run stands: everything a checkpoint holds beside weights and optimizers."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    grown_at: int = 0
    cycle: int = 0
    curve: list[dict[str, float]] | None = None


class Pretraining:
    """One resumable run. Call `run`; then `model` holds the result.

    The loss may be replaced (distillation does): it takes the model, inputs and targets. In a
    process group each process takes its share of every batch's rows, so batches are multiples of
    the number of processes; all processes hold the same weights at all times.
    """

    def __init__(
        self,
        model: LanguageModel,
        mixture: Mixture,
        plan: RunPlan,
        folder: Path,
        *,
        held_out: np.ndarray | None = None,
        loss: Callable[[LanguageModel, Tensor, Tensor], Tensor] | None = None,
        report: Report = silent,
        compiled: bool = False,
    ) -> None:
        """Takes the parts; resumes from `folder`/checkpoint.pt where it exists.

        Args:
            model: starts at the first phase's depth.
            mixture: source of batches.
            plan: the schedule.
            folder: for the checkpoint and curve.json; created where absent.
            held_out: token ids measured during the run; None measures nothing.
            loss: of a model, inputs and targets; the model's own by default.
            report: called with progress in [0, 1] and a line of text every `log_every` steps.
            compiled: whether grown models are compiled.
        """
        self.model, self.mixture, self.plan, self.folder = model, mixture, plan, folder
        self.held_out, self.report, self.compiled = held_out, report, compiled
        self.loss = loss or (lambda m, inputs, targets: m.loss(inputs, targets))
        self.state = RunState(curve=[])
        folder.mkdir(parents=True, exist_ok=True)
        saved = folder / "checkpoint.pt"
        self.optimizers = make_optimizers(self.model, plan)
        if agreed(float(saved.exists())):
            self._restore(torch.load(saved, weights_only=False))
        self._began = time.monotonic() - self.state.seconds
        self._saved_at = time.monotonic()

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.model.device

    def _restore(self, saved: dict[str, Any]) -> None:
        self.mixture.restore(saved["mixture"])
        shape = ModelShape(**saved["shape"])
        if shape != self.model.shape:
            self._grow_to(shape.num_layers)
        self.state = RunState(**saved["state"])
        self.model.load_state_dict(saved["model"])
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)

    def save(self) -> None:
        """Process 0 writes the checkpoint and the loss curve."""
        self._saved_at = time.monotonic()
        if rank_and_size()[0] != 0:
            return
        payload = {
            "model": self.model.state_dict(),
            "shape": asdict(self.model.shape),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "mixture": self.mixture.state(),
            "state": asdict(self.state),
        }
        torch.save(payload, self.folder / "checkpoint.tmp")
        os.replace(self.folder / "checkpoint.tmp", self.folder / "checkpoint.pt")
        (self.folder / "curve.json").write_text(json.dumps(self.state.curve, indent=0) + "\n")

    def _grow_to(self, layers: int) -> None:
        device = self.device
        self.model = grow(self.model, layers, compiled=self.compiled).to(device)
        self.optimizers = make_optimizers(self.model, self.plan)
        self.state.grown_at = self.state.step

    def _progress(self) -> float:
        self.state.seconds = agreed(time.monotonic() - self._began)
        if self.plan.budget_minutes is None:
            return self.state.step / self.plan.max_steps
        return self.state.seconds / (60.0 * self.plan.budget_minutes)

    def step(self, phase: Phase, rate: float) -> Tensor:
        """One optimizer step; returns the detached loss of this process's rows."""
        inputs, targets = self.mixture.batch(phase.batch, phase.length)
        rank, size = rank_and_size()
        mine_in, mine_out = inputs[rank::size].to(self.device), targets[rank::size].to(self.device)
        loss = self.loss(self.model, mine_in, mine_out)
        loss.backward()  # type: ignore[no-untyped-call]
        average_gradients(self.model.parameters())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.plan.clip)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.state.step += 1
        self.state.tokens += inputs.numel()
        return loss.detach()

    def run(self, *, stop_after_steps: int | None = None) -> LanguageModel:
        """Trains to the end of the budget, or for `stop_after_steps` more steps; saves; returns."""
        recent: list[Tensor] = []
        first = self.state.step
        while (progress := self._progress()) < 1.0:
            if stop_after_steps is not None and self.state.step - first >= stop_after_steps:
                break
            phase = self.plan.phase_at(progress)
            if phase.layers != self.model.shape.num_layers:
                self._grow_to(phase.layers)
            if self.plan.cycle_at(progress) != self.state.cycle:
                self.state.cycle = self.plan.cycle_at(progress)
                self.state.grown_at = self.state.step
            since = self.state.step - self.state.grown_at
            recent.append(self.step(phase, self.plan.rate_at(progress, since)))
            if self.state.step % self.plan.log_every == 0:
                self._log(progress, float(torch.stack(recent).mean()))
                recent.clear()
            if time.monotonic() - self._saved_at > 60 * self.plan.checkpoint_minutes:
                self.save()
        self.save()
        return self.model

    def _log(self, progress: float, loss: float) -> None:
        if not np.isfinite(loss):
            raise FloatingPointError(f"loss is {loss} at step {self.state.step}")
        state = self.state
        assert state.curve is not None
        if rank_and_size()[0] != 0:
            return
        row = {"step": state.step, "tokens": state.tokens, "minutes": state.seconds / 60}
        row |= {"layers": self.model.shape.num_layers, "loss": loss}
        rows = len(state.curve) + 1
        if self.held_out is not None and rows % self.plan.eval_every == 0:
            row["held_out"] = held_out_loss(self.model, self.held_out, 256, 48)
        state.curve.append({key: round(float(value), 4) for key, value in row.items()})
        text = " ".join(f"{key} {value:.4g}" for key, value in row.items())
        self.report(progress, text)
