"""One training run: it can resume, ends by time or steps, and may deepen the model on the way."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.tiny_family.model import LanguageModel, ModelShape, grow, load_weights, weights_of
from experiments.tiny_family.plan import Phase, RunPlan
from experiments.tiny_family.session import Report, silent
from experiments.tiny_family.streams import Mixture
from specdec.errors import UserError
from specdec.files import write_bytes, write_json
from specdec.train.fit import keep_settings

_TABLES = ("embed_tokens.weight", "lm_head.weight")
"""One row per token, not a linear map: not trained by Muon."""


def make_optimizers(model: torch.nn.Module, plan: RunPlan) -> list[torch.optim.Optimizer]:
    """Returns Muon for the layers' matrices, if there are any, and AdamW for tables and norms."""
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, weight in model.named_parameters():
        is_matrix = weight.dim() == 2 and not name.endswith(_TABLES)
        (matrices if is_matrix else others).append(weight)
    decay, group = plan.weight_decay, {"params": others, "peak": plan.adam_lr}
    adam = torch.optim.AdamW([group], weight_decay=decay, betas=(0.9, 0.98), eps=1e-10)
    if not matrices:
        return [adam]
    group = {"params": matrices, "peak": plan.muon_lr}
    return [torch.optim.Muon([group], weight_decay=decay, adjust_lr_fn="match_rms_adamw"), adam]


@torch.no_grad()
def held_out_loss(
    model: LanguageModel, tokens: np.ndarray, length: int = 512, max_windows: int = 0
) -> float:
    """Returns the mean loss in nats per token over non-overlapping windows of token ids [T].

    The first token of a window is context only. At most ``max_windows`` evenly spaced windows are
    used; 0 uses all.
    """
    count = (len(tokens) - 1) // length
    if not count:
        raise UserError(f"{len(tokens)} held-out tokens do not fill a window of {length}")
    kept = min(count, max_windows or count)
    starts, total = np.linspace(0, count - 1, kept).astype(int) * length, 0.0
    for first in range(0, len(starts), 8):
        rows = [tokens[i : i + length + 1].astype(np.int64) for i in starts[first : first + 8]]
        batch = torch.from_numpy(np.stack(rows)).to(model.device)
        loss = model.loss(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
        total += float(loss) * len(rows)
    return total / len(starts)


@dataclass(slots=True)
class RunState:
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0  # wall-clock time, earlier sessions included
    grown_at: int = 0  # step of the last growth or restart; warm-up counts from it
    cycle: int = 0
    curve: list[dict[str, float]] = field(default_factory=list)  # rows of the loss curve


class Loss:
    """The objective of a run: here the cross entropy of text; other losses derive from it."""

    def __call__(self, model: Any, inputs_BS: Tensor, targets_BS: Tensor) -> Tensor:
        """Returns the scalar loss in nats per token."""
        loss: Tensor = model.loss(inputs_BS, targets_BS)
        return loss

    def state(self) -> dict[str, Any]:
        """Returns the position of the loss's own draws, as plain values for a checkpoint."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        assert not state


_NOT_OF_WEIGHTS = ("checkpoint_minutes", "log_every", "eval_every", "eval_length")
_HELD_OUT_TOKENS = 12288  # per measurement during a run


@dataclass(eq=False)
class Pretraining:
    """One resumable run; ``run`` trains, then ``model`` is the result.

    Attributes:
        model: has the first phase's depth, or fewer layers, to which some are added.
        folder: for checkpoint.pt, from which a run resumes, settings.json and curve.json.
        held_out: token ids whose loss is measured during the run; None measures nothing.
        settings: further plain values; a run refuses to resume under changed ones.
    """

    model: LanguageModel
    mixture: Mixture
    plan: RunPlan
    folder: Path
    held_out: np.ndarray | None = None
    loss: Loss = field(default_factory=Loss)
    settings: Mapping[str, Any] = field(default_factory=dict)
    report: Report = silent

    def __post_init__(self) -> None:
        plan, mixture, held_out, self.state = self.plan, self.mixture, self.held_out, RunState()
        plan.check(self.model.shape)
        for phase in plan.phases:
            mixture.check(phase.length)
        if held_out is not None and len(held_out) <= plan.eval_length:
            raise UserError(
                f"{len(held_out)} held-out tokens do not fill a window of {plan.eval_length}:"
                " lower plan.eval_length"
            )
        checkpoint = self.folder / "checkpoint.pt"
        schedule = {f"plan.{k}": v for k, v in asdict(plan).items() if k not in _NOT_OF_WEIGHTS}
        every_setting = {**schedule, **mixture.settings(), **self.settings}
        keep_settings(self.folder / "settings.json", every_setting, checkpoint)
        self.optimizers = make_optimizers(self.model, plan)
        if checkpoint.exists():
            self._restore(torch.load(checkpoint, map_location="cpu", weights_only=True))
        self._began = time.monotonic() - self.state.seconds
        self._saved_at = time.monotonic()

    def _restore(self, saved: dict[str, Any]) -> None:
        self.mixture.restore(saved["mixture"])
        self.loss.restore(saved["loss"])
        shape = ModelShape(**saved["shape"])
        if shape != self.model.shape:
            self._grow_to(shape.num_layers)
        self.state = RunState(**saved["state"])
        load_weights(self.model, saved["model"])
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)

    def save(self) -> None:
        self._saved_at = time.monotonic()
        checkpoint = {
            "model": weights_of(self.model),
            "shape": asdict(self.model.shape),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "mixture": self.mixture.state(),
            "loss": self.loss.state(),
            "state": asdict(self.state),
        }
        stream = BytesIO()
        torch.save(checkpoint, stream)
        write_bytes(self.folder / "checkpoint.pt", stream.getvalue())
        write_json(self.folder / "curve.json", self.state.curve)

    def _grow_to(self, num_layers: int) -> None:
        self.model = grow(self.model, num_layers).to(self.model.device)
        self.optimizers = make_optimizers(self.model, self.plan)
        self.state.grown_at = self.state.step

    def _progress(self) -> float:
        self.state.seconds = time.monotonic() - self._began
        if self.plan.budget_minutes is None:
            return self.state.step / self.plan.max_steps
        return self.state.seconds / (60.0 * self.plan.budget_minutes)

    def step(self, phase: Phase, rate: float) -> Tensor:
        """Takes one optimizer step at a share of the peak step size; returns the loss."""
        inputs, targets = self.mixture.batch(phase.batch, phase.length)
        place = self.model.device
        loss = self.loss(self.model, inputs.to(place), targets.to(place))
        loss.backward()  # type: ignore[no-untyped-call]
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
        """Trains to the end of the plan, or for `stop_after_steps` more steps, and saves."""
        recent: list[Tensor] = []
        last = float("inf") if stop_after_steps is None else self.state.step + stop_after_steps
        while (progress := self._progress()) < 1.0 and self.state.step < last:
            phase, cycle = self.plan.phase_at(progress), self.plan.cycle_at(progress)
            if phase.layers is not None and phase.layers != self.model.shape.num_layers:
                self._grow_to(phase.layers)
            if cycle != self.state.cycle:
                self.state.cycle, self.state.grown_at = cycle, self.state.step
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
        row = {"step": state.step, "tokens": state.tokens, "minutes": state.seconds / 60}
        row |= {"layers": self.model.shape.num_layers, "loss": loss}
        if self.held_out is not None and (len(state.curve) + 1) % self.plan.eval_every == 0:
            length = self.plan.eval_length
            windows = max(1, _HELD_OUT_TOKENS // length)
            row["held_out"] = held_out_loss(self.model, self.held_out, length, windows)
        state.curve.append({key: round(float(value), 4) for key, value in row.items()})
        self.report(progress, " ".join(f"{key} {value:.4g}" for key, value in row.items()))
