"""The training loop: steps, checkpoints, and an estimate of time and memory."""

import copy
import os
import resource
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from specdec.data.files import read_json_object
from specdec.errors import UserError
from specdec.files import plain, write_bytes, write_json
from specdec.models.frozen import FrozenModel
from specdec.parts.fields import Count, Index, NotNegative, Positive, Share, validated
from specdec.train.drafter import Drafter
from specdec.train.losses import LossOptions
from specdec.train.progress import Report
from specdec.train.texts import Batch, Windows

_TABLES = ("embed_tokens.weight", "lm_head.weight", "wte.weight")
"""Suffixes of names of matrices with a row per token, which Muon does not train."""

_LOG_ROWS = 200  # rows of the loss curve of a whole run


@validated
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainPlan:
    """Schedule and optimizer of a run: the section ``plan`` of a training configuration."""

    learning_rate: Positive
    batch: Count  # windows per step
    length: Count  # tokens per window
    epochs: Positive = 1.0  # passes over the training answers, if ``max_steps`` is None
    max_steps: Count | None = None
    warmup_steps: Index = 40  # in which the learning rate rises linearly
    decay_from: Share = 0.5  # share of the run after which the learning rate falls to zero
    weight_decay: NotNegative = 0.0
    clip: Positive = 1.0  # largest norm of the gradient
    # "muon": Muon for the matrices, AdamW for tables and norms.
    optimizer: Literal["adamw", "muon"] = "adamw"
    checkpoint_minutes: Positive = 5.0  # between checkpoints
    stop_minutes: Positive | None = None  # after which this command ends with a checkpoint

    def steps(self, windows: Windows) -> int:
        if self.max_steps is not None:
            return self.max_steps
        return max(1, round(self.epochs * windows.steps_per_epoch))

    def rate(self, step: int, steps: int) -> float:
        """Returns the factor of the learning rate, in (0, 1], at a step (from 0) of ``steps``."""
        warmup = min(1.0, (step + 1) / max(1, self.warmup_steps))
        left = (steps - step) / max(1.0, steps * (1.0 - self.decay_from))
        return warmup * min(1.0, left)


_NOT_OF_WEIGHTS = ("checkpoint_minutes", "stop_minutes")


@dataclass(slots=True)
class FitState:
    step: int = 0
    tokens: int = 0  # trained on so far, padding excluded
    seconds: float = 0.0  # of training, in all commands that continued the run
    curve: list[dict[str, float]] = field(default_factory=list)


class Fit:
    """One training run, which resumes from ``folder``/checkpoint.pt if that exists."""

    def __init__(
        self,
        drafter: Drafter,
        target: FrozenModel,
        windows: Windows,
        *,
        plan: TrainPlan,
        loss: LossOptions,
        folder: Path,
        settings: Mapping[str, Any],
        report: Report,
    ) -> None:
        """Raises UserError if a checkpoint exists that had other ``settings`` (JSON values)."""
        self.drafter, self.target, self.windows = drafter, target, windows
        self.plan, self.loss, self.folder, self.report = plan, loss, folder, report
        self.steps, self.state = plan.steps(windows), FitState()
        schedule = {f"plan.{k}": v for k, v in asdict(plan).items() if k not in _NOT_OF_WEIGHTS}
        checkpoint = folder / "checkpoint.pt"
        every_setting = {**settings, **schedule, "loss": asdict(loss), "answers_crc": windows.crc}
        keep_settings(folder / "settings.json", every_setting, checkpoint)
        self._weights = [weight for weight in drafter.parameters() if weight.requires_grad]
        self._optimizers = _optimizers(drafter, plan)
        if checkpoint.exists():
            saved = torch.load(checkpoint, map_location="cpu", weights_only=True)
            self.state = FitState(**saved["state"])
            drafter.load_state_dict(saved["weights"], strict=False)
            for optimizer, stored in zip(self._optimizers, saved["optimizers"], strict=True):
                optimizer.load_state_dict(stored)

    @property
    def finished(self) -> bool:
        return self.state.step >= self.steps

    def save(self) -> None:
        trained = {n: w.detach() for n, w in self.drafter.named_parameters() if w.requires_grad}
        stream, states = BytesIO(), [optimizer.state_dict() for optimizer in self._optimizers]
        saved = {"weights": trained, "optimizers": states, "state": asdict(self.state)}
        torch.save(saved, stream)
        write_bytes(self.folder / "checkpoint.pt", stream.getvalue())

    def estimate(self) -> str:
        """Times one step, undoes it, and returns a line on the time left and the peak memory."""
        before = [weight.detach().clone() for weight in self._weights]
        states = copy.deepcopy([optimizer.state_dict() for optimizer in self._optimizers])
        began = time.monotonic()
        self._loss(self.state.step).backward()  # type: ignore[no-untyped-call]
        computed = time.monotonic()
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        per_update = time.monotonic() - computed
        with torch.no_grad():
            for weight, value in zip(self._weights, before, strict=True):
                weight.copy_(value)
        for optimizer, state in zip(self._optimizers, states, strict=True):
            optimizer.load_state_dict(state)
        per_position = (computed - began) / self.windows.size(self.state.step)
        ahead = np.linspace(self.state.step, max(self.state.step, self.steps - 1), 50)
        mean = float(np.mean([self.windows.size(int(step)) for step in ahead]))
        left, per_step = self.steps - self.state.step, per_position * mean + per_update
        trained = sum(weight.numel() for weight in self._weights)
        return (
            f"{trained / 1e6:.1f} M trained weights, {left} steps of {mean:.0f} positions, about"
            f" {per_step:.2f} s each: {_duration(left * per_step)} in all;"
            f" peak memory about {(_peak_bytes(self.target) + 8 * trained) / 1e9:.1f} GB"
        )

    def run(self) -> bool:
        """Trains to the last step or for ``stop_minutes``; returns whether the run is finished.

        An interrupt (Ctrl+C) between two updates of the weights leaves a checkpoint.
        """
        state, began, before = self.state, time.monotonic(), self.state.seconds
        saved_at, recent, stop = began, list[Tensor](), self.plan.stop_minutes
        every = max(1, self.steps // _LOG_ROWS)
        whole = True  # whether weights and ``state`` are of the same step
        try:
            while not self.finished:
                loss = self._loss(state.step)
                loss.backward()  # type: ignore[no-untyped-call]
                nn.utils.clip_grad_norm_(self._weights, self.plan.clip)
                rate = self.plan.learning_rate * self.plan.rate(state.step, self.steps)
                whole = False
                for optimizer in self._optimizers:
                    for group in optimizer.param_groups:
                        group["lr"] = rate
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
                state.tokens += self.windows.num_tokens_of(state.step)
                state.step += 1
                whole = True
                recent.append(loss.detach())
                now = time.monotonic()
                state.seconds = before + now - began
                line = ""
                if state.step % every == 0 or self.finished:
                    line = self._log(float(torch.stack(recent).mean()))
                    recent.clear()
                self.report(state.step / self.steps, line)
                if stop is not None and now - began > 60 * stop:
                    break
                if now - saved_at > 60 * self.plan.checkpoint_minutes:
                    self.save()
                    saved_at = now
        except KeyboardInterrupt:
            if whole:
                self.save()
            raise
        self.save()
        return self.finished

    def _loss(self, step: int) -> Tensor:
        tokens, counts = (part.to(self.target.device) for part in self.windows.batch(step)[:2])
        return self.drafter.loss(self.target, Batch(tokens, counts, step), self.loss)

    def _log(self, loss: float) -> str:
        state = self.state
        if not np.isfinite(loss):
            raise UserError(
                f"the loss is {loss} at step {state.step}: lower plan.learning_rate, and delete"
                f" {self.folder / 'checkpoint.pt'}"
            )
        row = {"step": state.step, "tokens": state.tokens, "minutes": state.seconds / 60}
        state.curve.append({k: round(v, 4) for k, v in {**row, "loss": loss}.items()})
        return f"step {state.step}: loss {loss:.4f}, {state.tokens} tokens"


def _optimizers(drafter: Drafter, plan: TrainPlan) -> list[torch.optim.Optimizer]:
    named = [(name, weight) for name, weight in drafter.named_parameters() if weight.requires_grad]
    matrices = [
        weight for name, weight in named if weight.dim() == 2 and not name.endswith(_TABLES)
    ]
    shared: dict[str, Any] = {"lr": plan.learning_rate, "weight_decay": plan.weight_decay}
    adam: dict[str, Any] = {**shared, "betas": (0.9, 0.98)}
    if plan.optimizer == "adamw" or not matrices:
        return [torch.optim.AdamW([weight for _, weight in named], **adam)]
    of_muon = {id(weight) for weight in matrices}
    others = [weight for _, weight in named if id(weight) not in of_muon]
    muon = torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **shared)
    return [muon, torch.optim.AdamW(others, **adam)] if others else [muon]


def _peak_bytes(target: FrozenModel) -> int:
    if target.device.type == "cuda":
        return torch.cuda.max_memory_allocated(target.device)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def keep_settings(path: Path, settings: Mapping[str, Any], product: Path) -> None:
    """Writes settings to the JSON file ``path``, or compares them with it if ``product`` exists.

    Raises:
        UserError: the file ``product`` was made under other or unknown settings.
    """
    current = plain(dict(settings))
    if not product.exists():
        write_json(path, current)
        return
    remedy = f"give another work_dir, or delete {path.parent} to start over"
    if not path.exists():
        raise UserError(f"{path.parent} holds work without a record of its settings: {remedy}")
    recorded = read_json_object(path)
    pairs = ((key, recorded.get(key), current.get(key)) for key in {**recorded, **current})
    changed = "; ".join(f"{key} was {old}, is {new}" for key, old, new in pairs if old != new)
    if changed:
        raise UserError(f"{path.parent} holds work of other settings ({changed}): {remedy}")
