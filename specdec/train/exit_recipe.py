"""The recipe of exit heads and Medusa heads: self-distillation (PPSD 5.1, D) and its evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from specdec.train.card import BATCH, RANKS, SETTINGS, Agreement, in_loop, prompts_of
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
from specdec.train.lm import Phase, Pretraining, Report, RunPlan, silent
from specdec.train.model import LanguageModel, load_hf
from specdec.train.parallel import rank_and_size, spawned
from specdec.train.recipes import need, pick_device, record_run, set_up, write_json
from specdec.train.samples import Sampling, generate, same_length_batches
from specdec.train.streams import Mixture, load_streams


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
    dtype = set_up(num_threads, precision)
    specs = [HeadSpec.of(values) for values in heads]
    folder = need(out / "target" / "model.safetensors", "target").parent
    target = load_hf(folder, dtype=dtype, compiled=compiled).to(place)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    streams = _streams(work, target, tokenizer, sampling, seed, report)
    epoch_tokens = sum(len(streams[name]) for name, share in weights.items() if share > 0)
    made_heads, mixture = ExitHeads(target, specs).to(place), Mixture(streams, weights, seed)
    if warm_batches:
        sizes = (plan["batch"] or 8, plan["length"])
        warm_start(target, made_heads, (mixture.batch(*sizes)[0] for _ in range(warm_batches)))
    run = Pretraining(
        made_heads,  # type: ignore[arg-type]
        mixture,
        make_exit_plan(plan, specs, layers=target.shape.num_layers, epoch_tokens=epoch_tokens),
        work / "heads" / specs[0].name,
        loss=SelfDistillation(target, compiled=compiled, **loss),  # type: ignore[arg-type]
        report=report,
    )
    trained = run.run()
    if rank_and_size()[0] == 0:
        assert isinstance(trained, ExitHeads)
        save_heads(trained, out / "heads")
        name = specs[0].name
        extra = {"heads": [spec.name for spec in specs], "loss": loss, "weights": weights}
        record_run(run, out / "heads" / f"training-{name}.json", extra)
        found = evaluate_heads(target, trained, tokenizer, evaluation, seed, report)
        write_json(out / "heads" / f"measured-{name}.json", found)


def _streams(
    work: Path,
    target: LanguageModel,
    tokenizer: Tokenizer,
    sampling: dict[str, Any] | None,
    seed: int,
    report: Report,
) -> dict[str, np.ndarray]:
    """Token streams; with ``sampling`` also the target's own continuations, as "samples"."""
    streams = load_streams(need(work / "tokens.npz", "tokenizer"))
    if sampling is not None:
        streams["samples"] = sample_target(
            work=work,
            target=target,
            tokenizer=tokenizer,
            streams=streams,
            sampling=sampling,
            seed=seed,
            report=report,
        )
    return streams


def make_exit_plan(
    plan: Mapping[str, Any], specs: Sequence[HeadSpec], *, layers: int, epoch_tokens: int
) -> RunPlan:
    """The schedule of a run; the paper's values for the heads' kind where ``plan`` has None.

    Args:
        plan: learning_rate, batch, epochs, length, budget_minutes, max_steps, warmup_steps and
            decay_from, as in conf/train/exit_head.yaml.
        specs: the heads.
        layers: of the target.
        epoch_tokens: tokens of an epoch.

    Raises:
        ValueError: an unknown or missing key, or heads of kinds that the paper trains differently
            without values for both.
    """
    given = dict(plan)
    found = {STATED[spec.kind] for spec in specs}
    stated = next(iter(found))
    for key in ("learning_rate", "batch", "epochs"):
        if given.get(key) is None:
            if len(found) > 1:
                raise ValueError(
                    f"heads of several kinds are trained in one run: give plan.{key}, for which the"
                    " paper's value differs by kind, or train one kind at a time"
                )
            given[key] = getattr(stated, key)
    try:
        rate, batch, epochs = (given.pop(k) for k in ("learning_rate", "batch", "epochs"))
        length, steps = given.pop("length"), given.pop("max_steps")
        steps = steps or max(1, round(epochs * epoch_tokens / (batch * length)))
        return RunPlan(
            phases=(Phase(until=1.0, layers=layers, length=length, batch=batch),),
            max_steps=steps,
            muon_lr=rate,
            adam_lr=rate,
            weight_decay=0.0,
            log_every=max(1, min(50, steps // 8)),
            **given,
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"plan={dict(plan)}: {error}") from error


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
    for name, limit in evaluation["prompts"].items():
        prompts = prompts_of(name, tokenizer, limit)
        longest = target.shape.max_positions - evaluation["new_tokens"]
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
    generator = torch.Generator().manual_seed(seed)
    totals = [Agreement([0] * len(RANKS), [0] * len(RANKS)) for _ in heads]
    layers = {head.spec.layer for head in heads}
    for group in same_length_batches([prompt.numpy() for prompt in prompts], BATCH):
        out = generate(target, group, new_tokens, [sampling], generator, stop_at_end=True)
        for prompt, row in zip(group, out, strict=True):
            ends = np.flatnonzero(row.numpy() == 0)
            new = row[: int(ends[0]) + 1] if len(ends) else row
            tokens = torch.cat((prompt, new)).to(target.device)
            streams = target.residuals(tokens[None, :-1], layers)
            loops = in_loop(new.tolist())
            for head, total in zip(heads, totals, strict=True):
                first = max(0, len(prompt) - 1 - head.spec.offset)  # row that predicts new[0]
                logits = head.logits(target, streams[head.spec.layer])[0, first:]
                chosen = tokens[first + 1 + head.spec.offset :, None]
                logits = logits[: len(chosen)]
                ranks = (logits > logits.gather(-1, chosen)).sum(-1).tolist()
                total.add(ranks, loops[len(loops) - len(ranks) :])
    return totals
