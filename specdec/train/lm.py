"""Pre-training: a time-budgeted language-model run that may deepen the model on its way."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from specdec.errors import UserError
from specdec.files import write_bytes, write_json
from specdec.train.model import LanguageModel, ModelShape, grow
from specdec.train.parallel import agreed, average_gradients, check_rows, own_rows, rank_and_size
from specdec.train.plan import Phase, RunPlan
from specdec.train.resuming import keep_settings
from specdec.train.streams import Mixture

_TABLES = ("embed_tokens.weight", "output.weight")  # one row per token: no matrices to Muon

Report = Callable[[float, str], None]
"""Called with progress in [0, 1] and a line of text."""


def silent(_progress: float, _line: str) -> None:
    """A Report that says nothing."""


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

    Raises:
        UserError: fewer tokens than a window.
    """
    count = (len(tokens) - 1) // length
    windows = np.arange(count) * length
    if max_windows and count > max_windows:
        windows = windows[np.linspace(0, count - 1, max_windows).astype(int)]
    if not len(windows):
        raise UserError(f"{len(tokens)} held-out tokens do not fill a window of {length}")
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


class Loss(Protocol):
    """What a run minimises. A loss that draws or counts says where it stands, for a resumed run."""

    def __call__(self, model: Any, inputs_BS: Tensor, targets_BS: Tensor, /) -> Tensor:
        """Scalar loss in nats per token."""
        ...

    def state(self) -> dict[str, Any]:
        """Position of the loss's own draws, as plain values."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Returns to a position that ``state`` gave."""
        assert not state


class TextLoss(Loss):
    """The model's own cross entropy of text."""

    def __call__(self, model: LanguageModel, inputs_BS: Tensor, targets_BS: Tensor) -> Tensor:
        """Scalar loss in nats per token."""
        return model.loss(inputs_BS, targets_BS)


_NOT_OF_WEIGHTS = ("checkpoint_minutes", "log_every", "eval_every", "eval_length")
_EVALUATED = 12288  # held-out tokens per measurement


class Pretraining:
    """One resumable run. Call `run`; then `model` holds the result.

    The loss may be replaced (distillation does). In a process group each process takes its share
    of every batch's rows, so batches are multiples of the number of processes; all processes hold
    the same weights at all times.
    """

    def __init__(
        self,
        model: LanguageModel,
        mixture: Mixture,
        plan: RunPlan,
        folder: Path,
        *,
        held_out: np.ndarray | None = None,
        loss: Loss | None = None,
        settings: Mapping[str, Any] | None = None,
        report: Report = silent,
        compiled: bool = False,
    ) -> None:
        """Takes the parts; resumes from `folder`/checkpoint.pt where it exists.

        Args:
            model: starts at the first phase's depth, or at one that can be grown to it.
            mixture: source of batches.
            plan: the schedule.
            folder: for the checkpoint, its settings and curve.json; created where absent.
            held_out: token ids measured during the run; None measures nothing.
            loss: ``TextLoss`` by default.
            settings: what the run is begun with beside plan and mixture, as plain values.
            report: called with progress in [0, 1] and a line of text every `log_every` steps.
            compiled: whether grown models are compiled.

        Raises:
            UserError: a plan that this model or these streams cannot run, or a checkpoint of a run
                begun with other settings.
        """
        self.model, self.mixture, self.plan, self.folder = model, mixture, plan, folder
        self.held_out, self.report, self.compiled = held_out, report, compiled
        self.loss: Loss = loss or TextLoss()
        self.state = RunState(curve=[])
        plan.check(model.shape)
        _check_data(plan, mixture, held_out)
        folder.mkdir(parents=True, exist_ok=True)
        saved = folder / "checkpoint.pt"
        begun_with = {**_plain_plan(plan), **mixture.settings(), **(settings or {})}
        keep_settings(folder / "settings.json", begun_with, [saved])
        self.optimizers = make_optimizers(self.model, plan)
        if agreed(float(saved.exists())):
            self._restore(torch.load(saved, map_location="cpu", weights_only=True))
        self._began = time.monotonic() - self.state.seconds
        self._saved_at = time.monotonic()

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.model.device

    def _restore(self, saved: dict[str, Any]) -> None:
        self.mixture.restore(saved["mixture"])
        self.loss.restore(saved["loss"])
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
            "loss": self.loss.state(),
            "state": asdict(self.state),
        }
        stream = BytesIO()
        torch.save(payload, stream)
        write_bytes(self.folder / "checkpoint.pt", stream.getvalue())
        write_json(self.folder / "curve.json", self.state.curve)

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
        loss = self.loss(self.model, *own_rows(inputs, targets, device=self.device))
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
            if phase.layers not in (None, self.model.shape.num_layers):
                assert phase.layers is not None
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
            length = self.plan.eval_length
            most = max(1, _EVALUATED // length)
            row["held_out"] = held_out_loss(self.model, self.held_out, length, most)
        state.curve.append({key: round(float(value), 4) for key, value in row.items()})
        text = " ".join(f"{key} {value:.4g}" for key, value in row.items())
        self.report(progress, text)


def _plain_plan(plan: RunPlan) -> dict[str, Any]:
    """What of a plan decides the weights, by "plan.KEY"."""
    names = [entry.name for entry in fields(plan) if entry.name not in _NOT_OF_WEIGHTS]
    values = asdict(plan)
    return {f"plan.{name}": values[name] for name in names}


def _check_data(plan: RunPlan, mixture: Mixture, held_out: np.ndarray | None) -> None:
    """Refuses, before the first step, windows that would fail at one of the phases."""
    for phase in plan.phases:
        check_rows(phase.batch, "batch")
        mixture.check(phase.length)
    if held_out is not None and len(held_out) <= plan.eval_length:
        raise UserError(
            f"{len(held_out)} held-out tokens do not fill a window of {plan.eval_length}:"
            " lower plan.eval_length"
        )
