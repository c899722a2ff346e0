"""Finishing the target: repeated text in its own samples is made unlikely.

A small model repeats itself, since each repetition makes the next one likelier. Training on text
hardly helps, because text has few repetitions; the model's own samples have many. The objective is
sequence-level unlikelihood (Welleck et al., "Neural Text Generation with Unlikelihood Training",
ICLR 2020, section 5.2), beside cross entropy on text.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specdec.errors import UserError
from specdec.files import write_json
from specdec.metrics.loops import repeated_ngrams
from specdec.parts.build import build
from specdec.parts.fields import Count, Positive, Share, validated
from specdec.train.draft import sample_target
from specdec.train.lm import Loss, Pretraining
from specdec.train.model import LanguageModel, load_hf, load_weights, save_hf, weights_of
from specdec.train.parallel import check_rows, own_rows, rank_and_size, wait_for_all
from specdec.train.plan import RunPlan
from specdec.train.recipes import read_teacher, record_run
from specdec.train.resuming import keep_settings, weights_hash
from specdec.train.session import Session
from specdec.train.streams import Mixture


def mark_repeated(
    continuation: npt.NDArray[Any], *, vocab_size: int, ngram: int
) -> npt.NDArray[Any]:
    """Adds vocab_size to every token that is part of a repeated n-gram.

    All tokens of the n-gram are marked: with only the last one marked, a model learns to repeat
    n - 1 tokens.

    Args:
        continuation: int[T], generated tokens only.
        vocab_size: V.
        ngram: n.

    Returns:
        int64[T]; the first occurrence of an n-gram is not marked.
    """
    ends = np.flatnonzero(repeated_ngrams(continuation.tolist(), ngram))
    marked = continuation.astype(np.int64)
    members = np.unique(ends[:, None] - np.arange(ngram))
    marked[members] += vocab_size
    return marked


def interpolate(first: LanguageModel, last: LanguageModel, share: float) -> LanguageModel:
    """Moves the weights of `first` by a share of the way to those of `last`; returns `first`.

    Half-way between a model and its fine-tuned form most of the gain remains, and most of the loss
    on other inputs disappears (Wortsman et al., "Robust fine-tuning of zero-shot models", CVPR
    2022, section 3).
    """
    ends = weights_of(last)
    load_weights(first, {name: w.lerp(ends[name], share) for name, w in weights_of(first).items()})
    return first


class UnlikelihoodLoss(Loss):
    """Cross entropy of text plus unlikelihood of marked sample tokens.

    The second term is the mean over all positions of the sample windows of -log(1 - p(token)) at
    marked tokens and 0 elsewhere, so that it decreases with the number of repetitions.
    """

    @validated
    def __init__(self, samples: Mixture, *, weight: Positive, batch: Count, length: Count) -> None:
        """Checks the samples against the windows.

        Args:
            samples: one stream, marked by mark_repeated.
            weight: of the second term.
            batch: sample windows per step, over all processes.
            length: positions per sample window.

        Raises:
            UserError: the samples do not fill a window, or the batch does not divide evenly among
                the processes.
        """
        check_rows(batch, "unlikelihood.batch")
        samples.check(length)
        self.samples, self.weight, self.batch, self.length = samples, weight, batch, length

    def __call__(self, model: LanguageModel, inputs_BS: Tensor, targets_BS: Tensor) -> Tensor:
        """Scalar loss in nats per token."""
        inputs, targets = own_rows(
            *self.samples.batch(self.batch, self.length), device=model.device
        )
        vocab_size = model.shape.vocab_size
        repeated, tokens = targets >= vocab_size, targets % vocab_size
        logits = model(inputs % vocab_size)
        unlikelihood = (minus_log_rest(logits, tokens) * repeated).mean()
        return model.loss(inputs_BS, targets_BS) + self.weight * unlikelihood

    def state(self) -> dict[str, Any]:
        """Position of the draws of samples."""
        return self.samples.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Restores what ``state`` returned."""
        self.samples.restore(state)


def minus_log_rest(logits_BSV: Tensor, tokens_BS: Tensor) -> Tensor:
    """-log(1 - p(token)), float32 (B, S), with a correct gradient for p near 1.

    Computed as log-sum-exp of all logits minus that of the other tokens' logits: 1 - p itself
    rounds to zero in a stable repetition, where the gradient by the token's logit, p, is largest.
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
    last round's. Resumes after the last complete round. Arguments: conf/train/finish.yaml.
    """
    work, out = session.work / "finish", session.out / "target"
    seed, schedule, teacher = session.seed, RunPlan.of(plan), read_teacher(session)
    schedule.check(teacher.model.shape)
    settings = {"ngram": ngram, "sampling": sampling, "weights": weights, "seed": seed}
    settings |= {"unlikelihood": unlikelihood, "plan": plan}
    folder = first = _first_weights(teacher.model, work, settings)
    for number in range(rounds):
        here = work / str(number)
        if not (here / "model" / "model.safetensors").exists():
            model = session.load(folder)
            samples = sample_target(
                replace(teacher, model=model),
                work=here,
                sampling=sampling,
                seed=seed + number,
                mark=partial(mark_repeated, vocab_size=model.shape.vocab_size, ngram=ngram),
                report=session.report,
            )
            run = Pretraining(
                model,
                Mixture(teacher.streams, weights, seed + number),
                schedule,
                here,
                held_out=teacher.streams["held_out"],
                loss=_loss(unlikelihood, samples, seed),
                report=session.report,
            )
            _train_round(run, here, samples)
        folder = here / "model"
    if rank_and_size()[0] == 0:
        _write_finished(interpolate(load_hf(first), load_hf(folder), blend), work, out)
        _record_rounds(out / "training.json", work, rounds, blend)


def _loss(unlikelihood: dict[str, Any], samples: npt.NDArray[Any], seed: int) -> UnlikelihoodLoss:
    marked = Mixture({"samples": samples}, {"samples": 1.0}, seed)
    return build(UnlikelihoodLoss, unlikelihood, "unlikelihood", samples=marked)


def _first_weights(shipped: LanguageModel, work: Path, settings: dict[str, Any]) -> Path:
    """Folder of the weights before the first round; the first call saves them.

    Raises:
        UserError: existing rounds have other settings, or the shipped model is neither the one
            before them nor the one that this recipe wrote.
    """
    start, hashes = work / "start", work / "models.json"
    keep_settings(work / "settings.json", settings, [start / "model.safetensors"])
    if rank_and_size()[0] == 0:
        if not hashes.exists():
            save_hf(shipped, start)
            _record_hash(work, "start", shipped)
        elif weights_hash(shipped) not in json.loads(hashes.read_text()).values():
            raise UserError(
                f"output_dir/target is neither the model before the rounds in {work} nor the one"
                f" that they made: give another work_dir, or delete {work}"
            )
    wait_for_all()
    return start


def _write_finished(model: LanguageModel, work: Path, folder: Path) -> None:
    rounded = {name: weight.bfloat16() for name, weight in weights_of(model).items()}
    load_weights(model, rounded)  # the values of the file
    _record_hash(work, "written", model)
    save_hf(model, folder)


def _record_hash(work: Path, name: str, model: LanguageModel) -> None:
    """Adds a model's hash to models.json, by which a repeated command recognises it."""
    path = work / "models.json"
    hashes = json.loads(path.read_text()) if path.exists() else {}
    write_json(path, {**hashes, name: weights_hash(model)})


def _train_round(run: Pretraining, folder: Path, samples: npt.NDArray[Any]) -> None:
    """Trains a round to its end and writes its model; returns when every process is done."""
    repeated_share = float((samples >= run.model.shape.vocab_size).mean())
    run.report(0.0, f"{repeated_share:.1%} of the samples repeat")
    trained = run.run()
    if rank_and_size()[0] == 0:
        record_run(run, folder / "training.json", {"repeated_share": round(repeated_share, 4)})
        save_hf(trained, folder / "model")  # last: marks the round as complete
    wait_for_all()


def _record_rounds(path: Path, work: Path, rounds: int, blend: float) -> None:
    """Adds the rounds to the record of the target's training."""
    record = json.loads(path.read_text()) if path.exists() else {}
    runs = [json.loads((work / str(n) / "training.json").read_text()) for n in range(rounds)]
    keys = ("steps", "tokens", "minutes", "repeated_share", "windows")
    finish = {"blend": blend, "rounds": [{key: run[key] for key in keys} for run in runs]}
    write_json(path, record | {"finish": finish})
