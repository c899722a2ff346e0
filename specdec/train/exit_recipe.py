"""The recipe of exit heads and Medusa heads: self-distillation (PPSD 5.1, D) and its evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from specdec.errors import UserError
from specdec.files import write_json
from specdec.metrics.loops import repeated_ngrams
from specdec.train.card import SETTINGS, Agreement, check_data_name, continuations, prompts_of
from specdec.train.draft import sample_target
from specdec.train.exits import (
    ExitHead,
    ExitHeads,
    HeadKind,
    HeadSpec,
    SelfDistillation,
    save_heads,
    warm_start,
)
from specdec.train.keys import made_of
from specdec.train.lm import Pretraining, Report, silent
from specdec.train.model import LanguageModel
from specdec.train.parallel import rank_and_size, spawned
from specdec.train.plan import Phase, RunPlan
from specdec.train.recipes import pick_device, read_teacher, record_run, set_up
from specdec.train.resuming import weights_hash
from specdec.train.samples import Sampling
from specdec.train.streams import Mixture


@dataclass(frozen=True, slots=True)
class _Stated:
    """PPSD Table 4: what the paper states per kind of head."""

    learning_rate: float
    batch: int
    epochs: int


STATED = {
    HeadKind.NORM: _Stated(2e-5, 16, 1),
    HeadKind.TRANSFORMER: _Stated(5e-4, 2, 2),
    HeadKind.MEDUSA: _Stated(5e-4, 2, 2),  # PPSD states none for Medusa; those of its larger head
}


def train_exit_heads(
    *,
    work_dir: str,
    output_dir: str,
    heads: list[dict[str, object]],
    loss: dict[str, Any],
    warm_batches: int,
    plan: dict[str, Any],
    weights: dict[str, float],
    sampling: dict[str, Any] | None,
    evaluation: dict[str, Any],
    seed: int,
    precision: str,
    compiled: bool,
    num_threads: int,
    num_processes: int,
    device: str,
    report: Report,
) -> None:
    """Trains heads of output_dir/target together; the target's weights stay as they are.

    Writes heads/NAME.safetensors, training-NAME.json (of the run; the first head's name) and
    measured-NAME.json (agreement by data set). Arguments: conf/train/exit_head.yaml.
    """
    if spawned(train_exit_heads, locals(), num_processes):
        return
    work, out, place = Path(work_dir), Path(output_dir), pick_device(device)
    dtype, specs = set_up(num_threads, precision), [HeadSpec.of(values) for values in heads]
    teacher = read_teacher(work, out / "target", dtype=dtype, device=place, compiled=compiled)
    target, streams = teacher.model, dict(teacher.streams)
    made_heads = ExitHeads(target, specs).to(place)
    name = specs[0].name
    distillation = made_of(SelfDistillation, loss, "loss", target=target, compiled=compiled)
    _check_before_sampling(target, specs, plan, evaluation)
    folder = work / "heads" / name
    if sampling is not None:
        streams["samples"] = sample_target(
            teacher, work=folder, sampling=sampling, seed=seed, report=report
        )
    mixture = Mixture(streams, weights, seed)
    schedule = make_exit_plan(plan, specs, epoch_tokens=mixture.num_tokens)
    _warm_up(target, made_heads, mixture, schedule.phases[0], warm_batches)
    about = {"heads": list(made_heads.heads), "warm_batches": warm_batches}
    run = Pretraining(
        made_heads,  # type: ignore[arg-type]
        mixture,
        schedule,
        folder,
        loss=distillation,
        settings={"target": weights_hash(target), "loss": loss, **about},
        report=report,
    )
    trained = run.run()
    if rank_and_size()[0] == 0:
        assert isinstance(trained, ExitHeads)
        save_heads(trained, out / "heads")
        extra = {**about, "loss": loss, "weights": weights}
        record_run(run, out / "heads" / f"training-{name}.json", extra)
        found = evaluate_heads(target, trained, teacher.tokenizer, evaluation, seed, report)
        write_json(out / "heads" / f"measured-{name}.json", found)


def _warm_up(
    target: LanguageModel, heads: ExitHeads, mixture: Mixture, phase: Phase, batches: int
) -> None:
    if not batches:
        return
    mixture.check(phase.length)
    inputs = (mixture.batch(phase.batch, phase.length)[0] for _ in range(batches))
    warm_start(target, heads, inputs)


def _check_before_sampling(
    target: LanguageModel,
    specs: Sequence[HeadSpec],
    plan: Mapping[str, Any],
    evaluation: Mapping[str, Any],
) -> None:
    """Refuses what would fail after minutes of sampling or of training.

    Raises:
        UserError: a plan that cannot be run, unknown data sets, or continuations beyond the model.
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
    """The schedule of a run; the paper's values for the heads' kind where ``plan`` has None.

    Args:
        plan: learning_rate, batch, epochs, length, budget_minutes, max_steps, warmup_steps and
            decay_from, as in conf/train/exit_head.yaml.
        specs: the heads.
        epoch_tokens: tokens of an epoch.

    Raises:
        UserError: an unknown or missing key, or heads of kinds that the paper trains differently
            without values for both.
    """
    given = dict(plan)
    found = {STATED[spec.kind] for spec in specs}
    stated = next(iter(found))
    for key in ("learning_rate", "batch", "epochs"):
        if given.get(key) is None:
            if len(found) > 1:
                raise UserError(
                    f"heads of several kinds are trained in one run: give plan.{key}, for which the"
                    " paper's value differs by kind, or train one kind at a time"
                )
            given[key] = getattr(stated, key)
    missing = [key for key in ("length", "max_steps") if key not in given]
    if missing:
        raise UserError(f"plan: missing keys: {', '.join(missing)}")
    rate, batch, epochs = (given.pop(k) for k in ("learning_rate", "batch", "epochs"))
    length, steps = given.pop("length"), given.pop("max_steps")
    steps = steps or max(1, round(epochs * epoch_tokens / (batch * length)))
    fixed = {
        "phases": [{"until": 1.0, "length": length, "batch": batch}],
        "max_steps": steps,
        "muon_lr": rate,
        "adam_lr": rate,
        "weight_decay": 0.0,
        "log_every": max(1, min(50, steps // 8)),
    }
    return RunPlan.of({**given, **fixed})


def evaluate_heads(
    target: LanguageModel,
    heads: Sequence[ExitHead] | ExitHeads,
    tokenizer: Tokenizer,
    evaluation: Mapping[str, Any],
    seed: int,
    report: Report = silent,
) -> list[dict[str, Any]]:
    """Each head's top-k agreement with the target's own continuations, in and outside loops.

    Top-1 outside loops is the acceptance that a pipeline verifies token by token (PPSD's alpha)
    where no text repeats. Data sets that are absent are left out.

    Args:
        target: the frozen target.
        heads: of it.
        tokenizer: the family's.
        evaluation: ``prompts`` (data set -> number of prompts) and ``new_tokens``.
        seed: of the continuations.
        report: progress.
    """
    rows = []
    longest = target.shape.max_positions - evaluation["new_tokens"]
    for name, limit in evaluation["prompts"].items():
        prompts = prompts_of(name, tokenizer, limit)
        prompts = [prompt[-longest:] for prompt in prompts]
        for rule, sampling in SETTINGS.items() if prompts else ():
            found = _agreement(target, heads, prompts, sampling, evaluation["new_tokens"], seed)
            for head, counts in zip(heads, found, strict=True):
                row = {
                    "head": head.spec.name,
                    "data": name,
                    "sampling": rule,
                    "prompts": len(prompts),
                    "tokens": counts.inside + counts.outside,
                    "loop_share": counts.loop_share,
                    "outside": counts.rates(inside=False),
                    "inside": counts.rates(inside=True),
                }
                rows.append(row)
                outside = row["outside"][0]  # type: ignore[index]
                report(1.0, f"{head.spec.name} on {name}, {rule}: {outside:.3f} outside loops")
    return rows


@torch.no_grad()
def _agreement(
    target: LanguageModel,
    heads: Sequence[ExitHead] | ExitHeads,
    prompts: Sequence[Tensor],
    sampling: Sampling,
    new_tokens: int,
    seed: int,
) -> list[Agreement]:
    totals = [Agreement() for _ in heads]
    layers = {head.spec.layer for head in heads}
    for prompt, new in continuations(target, prompts, sampling, new_tokens, seed):
        tokens = torch.cat((prompt, new)).to(target.device)
        streams = target.residuals(tokens[None, :-1], layers)
        loops = repeated_ngrams(new.tolist()).tolist()
        for head, total in zip(heads, totals, strict=True):
            first = max(0, len(prompt) - 1 - head.spec.offset)  # row that predicts new[0]
            logits = head.logits(target, streams[head.spec.layer])[0, first:]
            chosen = tokens[first + 1 + head.spec.offset :, None]
            logits = logits[: len(chosen)]
            ranks = (logits > logits.gather(-1, chosen)).sum(-1).tolist()
            total.add(ranks, loops[len(loops) - len(ranks) :])
    return totals
