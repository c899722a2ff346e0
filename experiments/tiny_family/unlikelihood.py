"""Fine-tuning of the target that makes repetitions in its own samples unlikely.

A small model repeats itself, since each repetition makes the next one likelier. Training on text
hardly helps, because text has few repetitions; the model's own samples have many. The objective is
sequence-level unlikelihood (Welleck et al., "Neural Text Generation with Unlikelihood Training",
ICLR 2020, section 5.2), beside cross entropy on text.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.tiny_family.lm import Loss, Pretraining
from experiments.tiny_family.model import LanguageModel, load_hf, save_hf, weights_hash
from experiments.tiny_family.plan import RunPlan, build
from experiments.tiny_family.recipes import read_teacher, train_and_save
from experiments.tiny_family.samples import sample_target
from experiments.tiny_family.session import Session
from experiments.tiny_family.streams import Mixture
from specdec.data.files import read_json
from specdec.errors import UserError
from specdec.files import write_json
from specdec.metrics.loops import repeated_ngrams
from specdec.parts.fields import Count, Positive, Share, validated
from specdec.train.fit import keep_settings


def mark_repeated(continuation: np.ndarray, *, vocab_size: int, ngram: int) -> np.ndarray:
    """Adds vocab_size to every token that is part of a repeated n-gram; int[T] to int64[T].

    All tokens of an n-gram are marked except in its first occurrence: with only the last one
    marked, a model learns to repeat n - 1 tokens.
    """
    ends = np.flatnonzero(repeated_ngrams(continuation.tolist(), ngram))
    marked = continuation.astype(np.int64)
    marked[np.unique(ends[:, None] - np.arange(ngram))] += vocab_size
    return marked


@validated
@dataclass
class UnlikelihoodLoss(Loss):
    """Cross entropy of text plus unlikelihood of marked sample tokens.

    The second term is the mean over all positions of the sample windows of -log(1 - p(token)) at
    marked tokens and 0 elsewhere, so that it decreases with the number of repetitions. ``weight``
    is its weight, ``samples`` one stream marked by mark_repeated.
    """

    samples: Mixture
    weight: Positive
    batch: Count  # sample windows per step
    length: Count  # positions per sample window

    def __post_init__(self) -> None:
        self.samples.check(self.length)

    def __call__(self, model: LanguageModel, inputs_BS: Tensor, targets_BS: Tensor) -> Tensor:
        batches = self.samples.batch(self.batch, self.length)
        inputs, targets = (part.to(model.device) for part in batches)
        vocab_size = model.shape.vocab_size
        repeated, tokens = targets >= vocab_size, targets % vocab_size
        logits = model(inputs % vocab_size)
        unlikelihood = (minus_log_rest(logits, tokens) * repeated).mean()
        return model.loss(inputs_BS, targets_BS) + self.weight * unlikelihood

    def state(self) -> dict[str, Any]:
        return self.samples.state()

    def restore(self, state: dict[str, Any]) -> None:
        self.samples.restore(state)


def minus_log_rest(logits_BSV: Tensor, tokens_BS: Tensor) -> Tensor:
    """Returns -log(1 - p(token)), float32 (B, S), with a correct gradient for p near 1.

    It is log-sum-exp of all logits minus that of the other tokens' logits: 1 - p itself rounds to
    zero in a stable repetition, where the gradient by the token's logit, p, is largest.
    """
    others_BSV = logits_BSV.scatter(-1, tokens_BS[..., None], -torch.inf)
    return logits_BSV.logsumexp(-1) - others_BSV.logsumexp(-1)


def finish_target(
    session: Session,
    *,
    rounds: int,
    ngram: int,
    blend: Share,
    sampling: dict[str, Any],
    weights: dict[str, float],
    unlikelihood: dict[str, Any],
    plan: dict[str, Any],
) -> None:
    """Reduces the target's repetitions in rounds of sampling and training on the samples.

    Replaces output_dir/target by weights between the first ones (in work_dir/finish/start) and the
    last round's. Resumes after the last complete round. Arguments: finish.yaml.
    """
    work, seed, report = session.work / "finish", session.seed, session.report
    schedule, teacher = RunPlan.of(plan), read_teacher(session)
    schedule.check(teacher.model.shape)
    vocab_size = teacher.model.shape.vocab_size
    settings = {"ngram": ngram, "sampling": sampling, "weights": weights, "seed": seed}
    settings |= {"unlikelihood": unlikelihood, "plan": plan}
    folder = _first_weights(teacher.model, work, settings)
    mark = partial(mark_repeated, vocab_size=vocab_size, ngram=ngram)
    for number in range(rounds):
        here, before = work / str(number), folder
        folder = here / "model"
        if (folder / "model.safetensors").exists():
            continue
        teacher = replace(teacher, model=session.load(before))
        at = seed + number
        samples = sample_target(teacher, sampling, here, seed=at, report=report, mark=mark)
        marked = Mixture({"samples": samples}, {"samples": 1.0}, seed)
        loss = build(UnlikelihoodLoss, unlikelihood, "unlikelihood", samples=marked)
        mixture, held_out = Mixture(teacher.streams, weights, at), teacher.streams["held_out"]
        run = Pretraining(teacher.model, mixture, schedule, here, held_out, loss, report=report)
        share = float((samples >= vocab_size).mean())
        report(0.0, f"{share:.1%} of the samples repeat")
        save = partial(save_hf, folder=folder)  # marks the round as complete
        train_and_save(run, here / "training.json", save, {"repeated_share": round(share, 4)})
    _write_finished(work, folder, rounds, blend, session.out / "target")


def _first_weights(shipped: LanguageModel, work: Path, settings: dict[str, Any]) -> Path:
    """Returns the folder of the weights before the first round; the first call saves them.

    Refuses rounds of other settings, and a model that is neither the one before nor after them.
    """
    start, hashes = work / "start", work / "models.json"
    keep_settings(work / "settings.json", settings, start / "model.safetensors")
    if not hashes.exists():
        save_hf(shipped, start)
        write_json(hashes, {"start": weights_hash(shipped)})
    elif weights_hash(shipped) not in read_json(hashes).values():
        raise UserError(
            f"output_dir/target is neither the model before the rounds in {work} nor the one"
            f" that they made: give another work_dir, or delete {work}"
        )
    return start


@torch.no_grad()
def _write_finished(work: Path, last: Path, rounds: int, blend: float, folder: Path) -> None:
    """Interpolates between the weights before and after the rounds and writes the result.

    Half-way between a model and its fine-tuned form most of the gain remains, and most of the loss
    on other inputs disappears (Wortsman et al., "Robust fine-tuning of zero-shot models", CVPR
    2022, section 3). The hash in models.json lets a repeated command recognise the result.
    """
    model = load_hf(work / "start")
    for weight, end in zip(model.parameters(), load_hf(last).parameters(), strict=True):
        weight.copy_(weight.lerp(end, blend).bfloat16())  # the file's precision, for the hash
    hashes = work / "models.json"
    write_json(hashes, {**read_json(hashes), "written": weights_hash(model)})
    save_hf(model, folder)
    path = folder / "training.json"
    record = read_json(path) if path.exists() else {}
    runs = [read_json(work / str(number) / "training.json") for number in range(rounds)]
    keys = ("steps", "tokens", "minutes", "repeated_share", "windows")
    finish = {"blend": blend, "rounds": [{key: run[key] for key in keys} for run in runs]}
    write_json(path, record | {"finish": finish})
