"""The recipe of exit heads and Medusa heads: self-distillation (PPSD 5.1, D) and its evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer
from torch import Tensor

from specdec.errors import UserError
from specdec.files import write_json
from specdec.parts.build import build
from specdec.train.agreement import agreement_by_data, check_data_name, ranks_of
from specdec.train.draft import sample_target
from specdec.train.exits import (
    ExitHeads,
    HeadKind,
    HeadSpec,
    SelfDistillation,
    save_heads,
    warm_start,
)
from specdec.train.lm import Pretraining, Report, silent
from specdec.train.model import LanguageModel
from specdec.train.parallel import rank_and_size
from specdec.train.plan import RunPlan
from specdec.train.recipes import read_teacher, record_run
from specdec.train.resuming import weights_hash
from specdec.train.session import Session
from specdec.train.streams import Mixture


@dataclass(frozen=True, slots=True)
class PaperSettings:
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
    """Trains heads of output_dir/target together; the target is not changed.

    Writes heads/NAME.safetensors for each head and, under the first head's name, training-NAME.json
    (record of the run) and measured-NAME.json (agreement by data set). Arguments:
    conf/train/exit_head.yaml.
    """
    seed, report = session.seed, session.report
    specs = [build(HeadSpec, head, "heads") for head in heads]
    teacher = read_teacher(session)
    target, streams = teacher.model, dict(teacher.streams)
    exit_heads = ExitHeads(target, specs).to(session.place)
    name = specs[0].name
    distillation = build(SelfDistillation, loss, "loss", target=target)
    _check_before_sampling(target, specs, plan, evaluation)
    folder, out = session.work / "heads" / name, session.out / "heads"
    if sampling is not None:
        streams["samples"] = sample_target(
            teacher, work=folder, sampling=sampling, seed=seed, report=report
        )
    mixture = Mixture(streams, weights, seed)
    schedule = make_exit_plan(plan, specs, epoch_tokens=mixture.num_tokens)
    if warm_batches:
        first = schedule.phases[0]
        mixture.check(first.length)
        batches = (mixture.batch(first.batch, first.length)[0] for _ in range(warm_batches))
        warm_start(target, exit_heads, batches)
    settings = {"heads": list(exit_heads.heads), "warm_batches": warm_batches, "loss": loss}
    run = Pretraining(
        exit_heads,  # type: ignore[arg-type]
        mixture,
        schedule,
        folder,
        loss=distillation,
        settings={"target": weights_hash(target), **settings},
        report=report,
    )
    run.run()
    if rank_and_size()[0] == 0:
        save_heads(exit_heads, out)
        record_run(run, out / f"training-{name}.json", {**settings, "weights": weights})
        rows = evaluate_heads(target, exit_heads, teacher.tokenizer, evaluation, seed, report)
        write_json(out / f"measured-{name}.json", rows)


def _check_before_sampling(
    target: LanguageModel,
    specs: Sequence[HeadSpec],
    plan: Mapping[str, Any],
    evaluation: Mapping[str, Any],
) -> None:
    """Checks what would otherwise fail after minutes of sampling or training.

    Raises:
        UserError: an invalid plan, an unknown data set, or continuations longer than the model's
            positions.
    """
    new_tokens = evaluation["new_tokens"]
    make_exit_plan(plan, specs, epoch_tokens=1).check(target.shape)
    for name in evaluation["prompts"]:
        check_data_name(name)
    if new_tokens >= target.shape.max_positions:
        raise UserError(
            f"evaluation.new_tokens={new_tokens} leaves no room for a prompt in the model's"
            f" {target.shape.max_positions} positions"
        )


def make_exit_plan(
    plan: Mapping[str, Any], specs: Sequence[HeadSpec], *, epoch_tokens: int
) -> RunPlan:
    """Builds the schedule; a value of None is replaced by the paper's for the heads' kind.

    Args:
        plan: learning_rate, batch, epochs, length, budget_minutes, max_steps, warmup_steps and
            decay_from, as in conf/train/exit_head.yaml.
        specs: the heads.
        epoch_tokens: tokens of an epoch.

    Raises:
        UserError: an unknown or missing key, or None for a value that differs by kind where heads
            are of several kinds.
    """
    values = dict(plan)
    stated = {STATED[spec.kind] for spec in specs}
    for key in ("learning_rate", "batch", "epochs"):
        if values.get(key) is None:
            if len(stated) > 1:
                raise UserError(
                    f"heads of several kinds are trained in one run: give plan.{key}, for which the"
                    " paper's value differs by kind, or train one kind at a time"
                )
            values[key] = getattr(next(iter(stated)), key)
    missing = [key for key in ("length", "max_steps") if key not in values]
    if missing:
        raise UserError(f"plan: missing keys: {', '.join(missing)}")
    rate, batch, epochs = (values.pop(k) for k in ("learning_rate", "batch", "epochs"))
    length, steps = values.pop("length"), values.pop("max_steps")
    steps = steps or max(1, round(epochs * epoch_tokens / (batch * length)))
    fixed = {
        "phases": [{"until": 1.0, "length": length, "batch": batch}],
        "max_steps": steps,
        "muon_lr": rate,
        "adam_lr": rate,
        "weight_decay": 0.0,
        "log_every": max(1, min(50, steps // 8)),
    }
    return RunPlan.of({**values, **fixed})


def evaluate_heads(
    target: LanguageModel,
    heads: ExitHeads,
    tokenizer: Tokenizer,
    evaluation: Mapping[str, Any],
    seed: int,
    report: Report = silent,
) -> list[dict[str, Any]]:
    """Each head's top-k agreement with the target's own continuations, in and outside loops.

    Top-1 outside loops is the acceptance rate of a pipeline that verifies token by token (PPSD's
    alpha) on text without repetitions. Absent data sets are skipped.

    Args:
        target: the frozen target.
        heads: its heads.
        tokenizer: the family's.
        evaluation: ``prompts`` (data set -> number of prompts) and ``new_tokens``.
        seed: of the continuations.
        report: progress.
    """
    layers = {head.spec.layer for head in heads}

    def rank_tokens(tokens_T: Tensor, prompt_length: int) -> list[list[int]]:
        streams = target.residuals(tokens_T[None, :-1], layers)
        ranks = []
        for head in heads:
            offset = head.spec.offset
            first = max(0, prompt_length - 1 - offset)  # row that predicts the first new token
            logits_TV = head.logits(target, streams[head.spec.layer])[0, first:]
            tokens = tokens_T[first + 1 + offset :]
            ranks.append(ranks_of(logits_TV[: len(tokens)], tokens))
        return ranks

    rows = []
    sizes = evaluation["prompts"], evaluation["new_tokens"]
    for records in agreement_by_data(target, rank_tokens, tokenizer, *sizes, seed):
        for head, record in zip(heads, records, strict=True):
            rows.append({"head": head.spec.name, **record})
            where = f"{record['data']}, {record['sampling']}"
            report(1.0, f"{head.spec.name} on {where}: {record['outside'][0]:.3f} outside loops")
    return rows
