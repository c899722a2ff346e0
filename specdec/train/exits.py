"""Heads that read a frozen model's residual stream: early exits and Medusa heads, and their recipe.

The recipe is self-distillation (PPSD 5.1, D). Shape letters as in model.py, and N = B S positions.
A head of offset d predicts the token d positions after the next one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.errors import UserError
from specdec.files import write_json
from specdec.parts.fields import Count, Index, NotNegative, Positive, validated
from specdec.train.agreement import agreement_by_data, check_evaluation
from specdec.train.draft import sample_target
from specdec.train.lm import Loss, Pretraining
from specdec.train.model import compiled_if, save_weights, weights_hash
from specdec.train.plan import RunPlan
from specdec.train.recipes import Teacher, read_frozen, train_and_save
from specdec.train.sections import build
from specdec.train.session import Session, rank_and_size
from specdec.train.streams import Mixture
from specdec.train.target import Target


class HeadKind(StrEnum):
    """The modules between the residual stream and the head's output matrix.

    ``NORM``: a norm (PPSD 5.3). ``TRANSFORMER``: a decoder layer of the target's shape and a norm
    (PPSD 5.3). ``MEDUSA``: a norm and a residual block of one linear layer (Medusa, arXiv
    2401.10774, 2.1).
    """

    NORM = "norm"
    TRANSFORMER = "transformer"
    MEDUSA = "medusa"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpec:
    """Configuration of one head, after ``layer`` layers of the target.

    ``offset`` counts positions beyond the next token; 0 for an early exit. Without ``own_output``
    the head uses the target's output matrix.
    """

    kind: HeadKind
    layer: Count
    offset: Index = 0
    own_output: bool = True

    @property
    def name(self) -> str:
        """File name without ending: ``transformer-3``, ``medusa-24-1``."""
        return f"{self.kind}-{self.layer}" + (f"-{self.offset}" if self.offset else "")


class TrainedExitHead(nn.Module):
    """One head; parameter names are those of its file."""

    def __init__(self, spec: HeadSpec, target: Target) -> None:
        super().__init__()
        depth, hidden = target.shape.num_layers, target.shape.hidden
        if spec.layer > depth:
            raise UserError(f"head {spec.name}: the target has {depth} layers only")
        self.spec = spec
        self.norm = copy.deepcopy(target.norm)
        self.place = min(spec.layer, depth - 1)  # position of the layer it replaces
        if spec.kind == HeadKind.TRANSFORMER:
            self.layer = copy.deepcopy(target.layers[self.place])
            self.layer.load_state_dict(target.layers[-1].state_dict())
        if spec.kind == HeadKind.MEDUSA:
            self.block = nn.Linear(hidden, hidden, bias=False)
            nn.init.zeros_(self.block.weight)
        if spec.own_output:
            self.output = nn.Linear(hidden, target.shape.vocab_size, bias=False)
            self.output.weight.data.copy_(target.get_output_embeddings().weight.data)
        self.requires_grad_(True)

    def last_hidden(self, target: Target, x_BSE: Tensor) -> Tensor:
        """Returns the input of the output matrix, float32 (B, S, E)."""
        if self.spec.kind == HeadKind.TRANSFORMER:
            x_BSE = target.run_layer(self.layer, x_BSE, self.place)
        h_BSE = self.norm(x_BSE)
        if self.spec.kind == HeadKind.MEDUSA:
            with target.autocast():
                h_BSE = h_BSE + F.silu(self.block(h_BSE))
        return h_BSE

    def matrix(self, target: Target) -> Tensor:
        output = self.output if self.spec.own_output else target.get_output_embeddings()
        weight: Tensor = output.weight
        return weight

    def logits(self, target: Target, x_BSE: Tensor) -> Tensor:
        """Returns float32 logits (B, S, V) from the residual stream after ``spec.layer`` layers."""
        with target.autocast():
            return F.linear(self.last_hidden(target, x_BSE), self.matrix(target)).float()


class ExitHeads(nn.Module):
    """Heads of one target, trained together on one forward pass of it by ``lm.Pretraining``."""

    def __init__(self, target: Target, specs: Sequence[HeadSpec]) -> None:
        super().__init__()
        names = [spec.name for spec in specs]
        if not names or len(set(names)) != len(names):
            raise UserError(f"heads must be named once each, got {names}")
        self.shape = target.shape
        self.heads = nn.ModuleDict({spec.name: TrainedExitHead(spec, target) for spec in specs})

    def __iter__(self) -> Iterator[TrainedExitHead]:
        return iter(self.heads.values())  # type: ignore[arg-type]

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device


def exit_loss(
    h_NE: Tensor, matrix_VE: Tensor, log_target_NV: Tensor, labels_N: Tensor, kl_weight: float
) -> Tensor:
    """PPSD D.1: L = lambda KL(teacher || head) + H(head, label), mean nats per position."""
    log_head_NV = F.log_softmax(F.linear(h_NE, matrix_VE).float(), dim=-1)
    kl = F.kl_div(log_head_NV, log_target_NV, reduction="batchmean", log_target=True)
    return kl_weight * kl + F.nll_loss(log_head_NV, labels_N)


@validated
@dataclass
class SelfDistillation(Loss):
    """Each head learns the frozen target's own distribution; the loss is the mean over the heads.

    A head of offset d learns the target's distribution d positions later, and the text's token
    there. The loss is compiled if the target is.

    Attributes:
        kl_weight: lambda of ``exit_loss``.
        temperature: of both distributions, also in the label's term (1 in the paper); below 1
            the likeliest tokens, which a verifier compares, weigh more.
        every: the loss uses one position in this many, at an offset that changes each step; saves
            products with the output matrix, most of a small model's work. 1 in the paper.
    """

    target: Target
    kl_weight: NotNegative = 1.0
    temperature: Positive = 1.0
    every: Count = 1

    def __post_init__(self) -> None:
        self.target.requires_grad_(False)
        self._calls = 0
        self.exit_loss = compiled_if(self.target.compiled, exit_loss)

    def __call__(self, heads: ExitHeads, inputs_BS: Tensor, targets_BS: Tensor) -> Tensor:
        target, depth, length = self.target, self.target.shape.num_layers, inputs_BS.shape[1]
        max_offset = max(head.spec.offset for head in heads)
        if length - max_offset < self.every:
            raise UserError(
                f"sequences of {length} positions are too short for offset={max_offset} and"
                f" every={self.every}"
            )
        at = torch.arange(self._calls % self.every, length - max_offset, self.every)
        self._calls += 1
        log_targets: dict[int, Tensor] = {}  # by offset
        with torch.no_grad():
            streams = target.residuals(inputs_BS, {head.spec.layer for head in heads})
            for offset in {head.spec.offset for head in heads}:
                logits_BSV = target.logits(streams[depth][:, at + offset]) / self.temperature
                log_targets[offset] = F.log_softmax(logits_BSV, dim=-1).flatten(0, 1)
        with target.autocast():
            losses = [
                self.exit_loss(
                    head.last_hidden(target, streams[head.spec.layer])[:, at].flatten(0, 1),
                    head.matrix(target) / self.temperature,
                    log_targets[head.spec.offset],
                    targets_BS[:, at + head.spec.offset].flatten(),
                    self.kl_weight,
                )
                for head in heads
            ]
        return torch.stack(losses).mean()

    def state(self) -> dict[str, int]:
        return {"calls": self._calls}

    def restore(self, state: dict[str, int]) -> None:
        self._calls = state["calls"]


@torch.no_grad()
def warm_start(
    target: Target, heads: ExitHeads, batches: Iterable[Tensor], *, ridge: float = 1e-3
) -> None:
    """Initialises the output matrices of untrained heads by a linear fit.

    Ridge regression maps the input of a head's output matrix to the input of the target's at the
    position that the head predicts from; the head's matrix becomes the target's after that map.
    ``batches`` are int64 token ids (B, S). ``ridge`` is relative to the diagonal's mean.
    """
    depth, width = target.shape.num_layers, target.shape.hidden
    own = [head for head in heads if head.spec.own_output]
    sums = [(torch.zeros(width, width), torch.zeros(width, width)) for _ in own]
    for tokens_BS in batches:
        streams = target.residuals(tokens_BS.to(target.device), {h.spec.layer for h in own})
        last_BSE = target.norm(streams[depth])
        for head, (inner, cross) in zip(own, sums, strict=True):
            offset, length = head.spec.offset, tokens_BS.shape[1]
            x_BSE = head.last_hidden(target, streams[head.spec.layer])
            x_NE = x_BSE[:, : length - offset].flatten(0, 1)
            inner += (x_NE.T @ x_NE).cpu()
            cross += (x_NE.T @ last_BSE[:, offset:].flatten(0, 1)).cpu()
    for head, (inner, cross) in zip(own, sums, strict=True):
        diagonal = ridge * inner.diagonal().mean() * torch.eye(width)
        map_EE = torch.linalg.solve(inner + diagonal, cross).to(target.device)
        head.output.weight.copy_(target.get_output_embeddings().weight @ map_EE.T)


def save_heads(heads: ExitHeads, folder: Path) -> None:
    for head in heads:
        spec = {key: str(value) for key, value in asdict(head.spec).items()}
        save_weights(head, folder / f"{head.spec.name}.safetensors", spec)


class PaperSettings(NamedTuple):
    """Training settings of one kind of head in PPSD Table 4."""

    learning_rate: float
    batch: int
    epochs: int


STATED = {
    HeadKind.NORM: PaperSettings(2e-5, 16, 1),
    HeadKind.TRANSFORMER: PaperSettings(5e-4, 2, 2),
    HeadKind.MEDUSA: PaperSettings(5e-4, 2, 2),  # the paper has no Medusa heads: as TRANSFORMER
}


def train_exit_heads(
    session: Session,
    *,
    heads: list[dict[str, Any]],
    loss: dict[str, Any],
    warm_batches: int,
    plan: dict[str, Any],
    weights: dict[str, float],
    sampling: dict[str, Any] | None,
    evaluation: dict[str, Any],
) -> None:
    """Trains exit heads of the model in output_dir/target in one run; its weights do not change.

    Writes heads/NAME.safetensors for each head and, under the first head's name, training-NAME.json
    (record of the run) and measured-NAME.json (agreement by data set). Arguments:
    conf/train/exit_head.yaml.
    """
    seed, report = session.seed, session.report
    specs = [build(HeadSpec, head, "heads") for head in heads]
    teacher = read_frozen(session)
    target, streams = teacher.model, dict(teacher.streams)
    exit_heads = ExitHeads(target, specs).to(session.place)
    name = specs[0].name
    distillation = build(SelfDistillation, loss, "loss", target=target)
    _check_before_sampling(target, specs, plan, evaluation)
    folder, out = session.work / "heads" / name, session.out / "heads"
    if sampling is not None:
        streams["samples"] = sample_target(teacher, sampling, folder, seed=seed, report=report)
    mixture = Mixture(streams, weights, seed, end=target.ends[0])
    epoch_tokens = sum(map(len, mixture.streams.values()))
    schedule = _exit_plan(plan, specs, epoch_tokens=epoch_tokens)
    if warm_batches:
        first = schedule.phases[0]
        mixture.check(first.length)
        batches = (mixture.batch(first.batch, first.length)[0] for _ in range(warm_batches))
        warm_start(target, exit_heads, batches)
    about = {"heads": list(exit_heads.heads), "warm_batches": warm_batches, "loss": loss}
    settings = {"target": weights_hash(target), **about}
    model: Any = exit_heads
    run = Pretraining(
        model, mixture, schedule, folder, loss=distillation, settings=settings, report=report
    )
    about["weights"] = weights
    train_and_save(run, out / f"training-{name}.json", partial(save_heads, folder=out), about)
    if rank_and_size()[0] == 0:
        rows = _evaluate(teacher, exit_heads, evaluation, session)
        write_json(out / f"measured-{name}.json", rows)


def _check_before_sampling(
    target: Target,
    specs: Sequence[HeadSpec],
    plan: Mapping[str, Any],
    evaluation: Mapping[str, Any],
) -> None:
    """Refuses what would otherwise fail after minutes of sampling or training."""
    _exit_plan(plan, specs, epoch_tokens=1).check(target.shape)
    check_evaluation(target, evaluation)


def _exit_plan(plan: Mapping[str, Any], specs: Sequence[HeadSpec], *, epoch_tokens: int) -> RunPlan:
    """Builds the schedule of a `plan` section; the paper's values for the heads replace None."""
    values, stated = dict(plan), {STATED[spec.kind] for spec in specs}
    for key in PaperSettings._fields:
        if values.get(key) is None:
            if len(stated) > 1:
                raise UserError(
                    f"heads of several kinds are trained in one run: give plan.{key}, for which the"
                    " paper's value differs by kind, or train one kind at a time"
                )
            values[key] = getattr(next(iter(stated)), key)
    if missing := [key for key in ("length", "max_steps") if key not in values]:
        raise UserError(f"plan: missing keys: {', '.join(missing)}")
    rate, batch, epochs = (values.pop(key) for key in PaperSettings._fields)
    length, steps = values.pop("length"), values.pop("max_steps")
    steps = steps or max(1, round(epochs * epoch_tokens / (batch * length)))
    values |= {"muon_lr": rate, "adam_lr": rate, "weight_decay": 0.0, "max_steps": steps}
    values |= {"phases": [{"until": 1.0, "length": length, "batch": batch}]}
    return RunPlan.of({**values, "log_every": max(1, min(50, steps // 8))})


def _evaluate(
    teacher: Teacher, heads: ExitHeads, evaluation: Mapping[str, Any], session: Session
) -> list[dict[str, Any]]:
    """Measures each head's top-k agreement with the target's own continuations.

    Top-1 outside loops is PPSD's alpha, the acceptance rate of a pipeline that verifies token by
    token, on text without repetitions.
    """
    target, layers = teacher.model, {head.spec.layer for head in heads}

    def predict(tokens: Tensor) -> list[tuple[int, Tensor]]:
        streams = target.residuals(tokens, layers)
        return [(h.spec.offset, h.logits(target, streams[h.spec.layer])[0]) for h in heads]

    rows = []
    sizes = evaluation["prompts"], evaluation["new_tokens"]
    for records in agreement_by_data(target, predict, teacher.tokenizer, *sizes, session.seed):
        for head, row in zip(heads, records, strict=True):
            rows.append({"head": head.spec.name, **row})
            where = f"{head.spec.name} on {row['data']}, {row['sampling']}"
            session.report(1.0, f"{where}: {row['outside'][0]:.3f} outside loops")
    return rows
