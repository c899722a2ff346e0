"""One training run: resumable, bounded by time or steps, may deepen the model on the way."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.errors import UserError
from specdec.files import plain, write_bytes, write_json
from specdec.train.model import LanguageModel, ModelShape, grow, load_weights, weights_of
from specdec.train.parallel import (
    average_gradients,
    check_rows,
    from_rank_0,
    own_rows,
    rank_and_size,
)
from specdec.train.plan import Phase, RunPlan
from specdec.train.streams import Mixture

_TABLES = ("embed_tokens.weight", "output.weight")  # one row per token: not trained by Muon

Report = Callable[[float, str], None]
"""Called with progress in [0, 1] and a line of text."""


def silent(_progress: float, _line: str) -> None:
    """A Report that prints nothing."""


def make_optimizers(model: torch.nn.Module, plan: RunPlan) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, if there are any; AdamW for tables and norms."""
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, weight in model.named_parameters():
        is_matrix = weight.dim() == 2 and not name.endswith(_TABLES)
        (matrices if is_matrix else others).append(weight)
    adam = torch.optim.AdamW(
        [{"params": others, "peak": plan.adam_lr}],
        weight_decay=plan.weight_decay,
        betas=(0.9, 0.98),
        eps=1e-10,
    )
    if not matrices:
        return [adam]
    muon = torch.optim.Muon(
        [{"params": matrices, "peak": plan.muon_lr}],
        weight_decay=plan.weight_decay,
        momentum=0.95,
        adjust_lr_fn="match_rms_adamw",
    )
    return [muon, adam]


@torch.no_grad()
def held_out_loss(
    model: LanguageModel, tokens: np.ndarray, length: int = 512, max_windows: int = 0
) -> float:
    """Mean loss in nats per token over non-overlapping windows of a token array.

    Args:
        model, tokens: the model, and ids in one dimension.
        length: positions per window; the first token of a window is context only.
        max_windows: number of evenly spaced windows; 0 uses all.

    Raises:
        UserError: fewer tokens than a window.
    """
    count = (len(tokens) - 1) // length
    if not count:
        raise UserError(f"{len(tokens)} held-out tokens do not fill a window of {length}")
    starts = np.arange(count) * length
    if max_windows and count > max_windows:
        starts = starts[np.linspace(0, count - 1, max_windows).astype(int)]
    total = 0.0
    for first in range(0, len(starts), 8):
        rows = [tokens[i : i + length + 1].astype(np.int64) for i in starts[first : first + 8]]
        batch = torch.from_numpy(np.stack(rows)).to(model.device)
        loss = model.loss(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
        total += float(loss) * len(rows)
    return total / len(starts)


@dataclass(slots=True)
class RunState:
    """Progress of a run, stored in its checkpoint beside weights and optimizers.

    Attributes:
        step, tokens: optimizer steps and training tokens so far, over all processes.
        seconds: wall-clock time so far, earlier sessions included.
        grown_at: step of the last growth or restart; warm-up counts from it.
        cycle: number of the current cycle.
        curve: rows of the loss curve.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    grown_at: int = 0
    cycle: int = 0
    curve: list[dict[str, float]] = field(default_factory=list)


class Loss:
    """What a run minimises: here the cross entropy of text; other losses derive from it."""

    def __call__(self, model: Any, inputs_BS: Tensor, targets_BS: Tensor) -> Tensor:
        """Scalar loss in nats per token."""
        loss: Tensor = model.loss(inputs_BS, targets_BS)
        return loss

    def state(self) -> dict[str, Any]:
        """Position of the loss's own draws, as plain values that a checkpoint stores."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Restores what ``state`` returned."""
        assert not state


_NOT_OF_WEIGHTS = ("checkpoint_minutes", "log_every", "eval_every", "eval_length")
_HELD_OUT_TOKENS = 12288  # per measurement during a run


class Pretraining:
    """One resumable run; ``run`` trains, then ``model`` is the result.

    In a process group each process trains on its share of every batch's rows, so batches are
    multiples of the number of processes; all processes have the same weights at every step.
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
    ) -> None:
        """Resumes from `folder`/checkpoint.pt if it exists.

        Args:
            model: has the first phase's depth, or fewer layers, which are added.
            mixture, plan: the batches and the schedule.
            folder: for checkpoint.pt, settings.json and curve.json; created if absent.
            held_out: token ids whose loss is measured during the run; None measures nothing.
            loss: None is the cross entropy of text.
            settings: further settings under which alone the run may resume, as plain values.
            report: called every `log_every` steps.

        Raises:
            UserError: the model or the streams do not fit the plan, or the checkpoint is of a run
                under other settings.
        """
        self.model, self.mixture, self.plan, self.folder = model, mixture, plan, folder
        self.held_out, self.report = held_out, report
        self.loss, self.state = loss or Loss(), RunState()
        plan.check(model.shape)
        for phase in plan.phases:
            check_rows(phase.batch, "batch")
            mixture.check(phase.length)
        if held_out is not None and len(held_out) <= plan.eval_length:
            raise UserError(
                f"{len(held_out)} held-out tokens do not fill a window of {plan.eval_length}:"
                " lower plan.eval_length"
            )
        checkpoint = folder / "checkpoint.pt"
        schedule = {f"plan.{k}": v for k, v in asdict(plan).items() if k not in _NOT_OF_WEIGHTS}
        every_setting = {**schedule, **mixture.settings(), **(settings or {})}
        keep_settings(folder / "settings.json", every_setting, [checkpoint])
        self.optimizers = make_optimizers(self.model, plan)
        if from_rank_0(float(checkpoint.exists())):
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
        """Writes the checkpoint and the loss curve, in process 0."""
        self._saved_at = time.monotonic()
        if rank_and_size()[0] != 0:
            return
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
        self.state.seconds = from_rank_0(time.monotonic() - self._began)
        if self.plan.budget_minutes is None:
            return self.state.step / self.plan.max_steps
        return self.state.seconds / (60.0 * self.plan.budget_minutes)

    def step(self, phase: Phase, rate: float) -> Tensor:
        """One optimizer step at a share of the peak step size; the loss of this process's rows."""
        inputs, targets = self.mixture.batch(phase.batch, phase.length)
        loss = self.loss(self.model, *own_rows(inputs, targets, device=self.model.device))
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
        """Trains to the end of the plan, or for `stop_after_steps` more steps, and saves."""
        recent: list[Tensor] = []
        first = self.state.step
        while (progress := self._progress()) < 1.0:
            if stop_after_steps is not None and self.state.step - first >= stop_after_steps:
                break
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
        if rank_and_size()[0] != 0:
            return
        row = {"step": state.step, "tokens": state.tokens, "minutes": state.seconds / 60}
        row |= {"layers": self.model.shape.num_layers, "loss": loss}
        if self.held_out is not None and (len(state.curve) + 1) % self.plan.eval_every == 0:
            length = self.plan.eval_length
            windows = max(1, _HELD_OUT_TOKENS // length)
            row["held_out"] = held_out_loss(self.model, self.held_out, length, windows)
        state.curve.append({key: round(float(value), 4) for key, value in row.items()})
        self.report(progress, " ".join(f"{key} {value:.4g}" for key, value in row.items()))


def keep_settings(path: Path, settings: Mapping[str, Any], products: Iterable[Path]) -> None:
    """Records the settings of new work, or compares them with those of existing work.

    Args:
        path: JSON file of settings beside the work.
        settings: plain values.
        products: files of the work; if none exists, the work is new.

    Raises:
        UserError: the work exists and its settings differ or were not recorded.
    """
    current = plain(dict(settings))
    if not any(product.exists() for product in products):
        if rank_and_size()[0] == 0:
            write_json(path, current)
        return
    remedy = f"give another work_dir, or delete {path.parent} to start over"
    if not path.exists():
        raise UserError(f"{path.parent} holds work without a record of its settings: {remedy}")
    recorded = json.loads(path.read_text())
    changed = [
        f"{key} was {recorded.get(key)}, is {current.get(key)}"
        for key in {**recorded, **current}
        if recorded.get(key) != current.get(key)
    ]
    if changed:
        raise UserError(
            f"{path.parent} holds work of other settings ({'; '.join(changed)}): {remedy}"
        )
