"""Finishing the target: loops in its own samples are made unlikely.

A small model repeats itself: what it has just said makes saying it again likelier. Likelihood of
text alone hardly cures that, since text has few loops to learn from; the model's own samples have
many. The objective is sequence-level unlikelihood (Welleck et al., "Neural Text Generation with
Unlikelihood Training", ICLR 2020, section 5.2), beside plain cross entropy on text.
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
from specdec.train.draft import sample_target
from specdec.train.keys import made_of
from specdec.train.lm import Loss, Pretraining, Report
from specdec.train.model import LanguageModel, load_hf, save_hf
from specdec.train.parallel import check_rows, own_rows, rank_and_size, spawned, wait_for_all
from specdec.train.plan import RunPlan
from specdec.train.recipes import pick_device, read_teacher, record_run, set_up
from specdec.train.resuming import keep_settings, weights_hash
from specdec.train.streams import Mixture


def mark_repeated(
    continuation: npt.NDArray[Any], *, vocab_size: int, ngram: int
) -> npt.NDArray[Any]:
    """Adds vocab_size to every token that is part of a repeated n-gram.

    All tokens of the n-gram count, not its last one alone: a model that is only told not to
    finish a repetition learns to repeat n - 1 tokens.

    Args:
        continuation: int[T], generated tokens only.
        vocab_size: V.
        ngram: n.

    Returns:
        int64[T]; a first occurrence stays unmarked.
    """
    ends = np.flatnonzero(repeated_ngrams(continuation.tolist(), ngram))
    marked = continuation.astype(np.int64)
    members = np.unique(ends[:, None] - np.arange(ngram))
    marked[members] += vocab_size
    return marked


def between(first: LanguageModel, last: LanguageModel, share: float) -> LanguageModel:
    """First weights moved by a share of the way to the last ones; changes and returns `first`.

    Half-way between a model and its fine-tuned form most of what was tuned for remains, and most
    of what the tuning cost elsewhere comes back (Wortsman et al., "Robust fine-tuning of zero-shot
    models", CVPR 2022, section 3).

    Raises:
        UserError: share is outside [0, 1].
    """
    if not 0.0 <= share <= 1.0:
        raise UserError(f"blend must be in [0, 1], got {share}")
    new = last.state_dict()
    mixed = {name: value.lerp(new[name], share) for name, value in first.state_dict().items()}
    first.load_state_dict(mixed)
    return first


class UnlikelihoodLoss(Loss):
    """Loss for lm.Pretraining: cross entropy of text plus unlikelihood of marked sample tokens.

    The second term is the mean over all positions of the sample windows of -log(1 - p(token)) at
    marked tokens and 0 elsewhere, so that it fades as the loops do.
    """

    def __init__(self, samples: Mixture, *, weight: float, batch: int, length: int) -> None:
        """Takes the samples and how they enter.

        Args:
            samples: one stream, marked by mark_repeated.
            weight: of the second term.
            batch: sample windows per step, over all processes.
            length: positions per sample window.

        Raises:
            UserError: a weight that is not positive, windows that the samples are too few for, or a
                batch that the processes do not share evenly.
        """
        if weight <= 0:
            raise UserError(f"the unlikelihood weight must be positive, got {weight}")
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
        """Returns to a position that ``state`` gave."""
        self.samples.restore(state)


def minus_log_rest(logits_BSV: Tensor, tokens_BS: Tensor) -> Tensor:
    """-log(1 - p(token)), float32 of shape (B, S), with its gradient however near p is to 1.

    As log-sum-exp of all logits less that of the others: 1 - p itself rounds to zero in a settled
    loop, where the gradient by the token's logit, p, is needed most.
    """
    others_BSV = logits_BSV.scatter(-1, tokens_BS[..., None], -torch.inf)
    return logits_BSV.logsumexp(-1) - others_BSV.logsumexp(-1)


def finish_target(
    *,
    work_dir: str,
    output_dir: str,
    rounds: int,
    ngram: int,
    blend: float,
    sampling: dict[str, Any],
    weights: dict[str, float],
    unlikelihood: dict[str, Any],
    plan: dict[str, Any],
    seed: int,
    precision: str,
    compiled: bool,
    num_threads: int,
    num_processes: int,
    device: str,
    report: Report,
) -> None:
    """Trains loops out of the target, in rounds of sampling from it and training on the samples.

    Arguments: conf/train/finish.yaml. Needs output_dir/target; replaces it by weights between the
    first ones, which work_dir/finish keeps, and the last round's. A repeated command goes on
    behind the last complete round.
    """
    if spawned(finish_target, locals(), num_processes):
        return
    work, out, place = Path(work_dir), Path(output_dir), pick_device(device)
    dtype, schedule = set_up(num_threads, precision), RunPlan.of(plan)
    teacher = read_teacher(work, out / "target", dtype=dtype, device=place, compiled=compiled)
    schedule.check(teacher.model.shape)
    begun_with = {"ngram": ngram, "sampling": sampling, "weights": weights, "seed": seed}
    begun_with |= {"unlikelihood": unlikelihood, "plan": plan}
    folder = first = _first_weights(teacher.model, work / "finish", begun_with)
    for number in range(rounds):
        here = work / "finish" / str(number)
        if not (here / "model" / "model.safetensors").exists():
            model = load_hf(folder, dtype=dtype, compiled=compiled).to(place)
            samples = sample_target(
                replace(teacher, model=model),
                work=here,
                sampling=sampling,
                seed=seed + number,
                mark=partial(mark_repeated, vocab_size=model.shape.vocab_size, ngram=ngram),
                report=report,
            )
            run = Pretraining(
                model,
                Mixture(teacher.streams, weights, seed + number),
                schedule,
                here,
                held_out=teacher.streams["held_out"],
                loss=_loss(unlikelihood, samples, seed),
                report=report,
            )
            _keep(run, here, samples)
        folder = here / "model"
    if rank_and_size()[0] == 0:
        _write_finished(work / "finish", between(load_hf(first), load_hf(folder), blend), out)
        _record(out / "target" / "training.json", work / "finish", rounds, blend)


def _loss(unlikelihood: dict[str, Any], samples: npt.NDArray[Any], seed: int) -> UnlikelihoodLoss:
    alone = Mixture({"samples": samples}, {"samples": 1.0}, seed)
    return made_of(UnlikelihoodLoss, unlikelihood, "unlikelihood", samples=alone)


def _first_weights(shipped: LanguageModel, work: Path, begun_with: dict[str, Any]) -> Path:
    """The folder of the weights that the first round begins with, kept at the first call.

    Raises:
        UserError: the rounds there were begun with other settings, or the shipped model is neither
            the one that they began with nor what this recipe made of it.
    """
    kept, known = work / "start", work / "models.json"
    keep_settings(work / "settings.json", begun_with, [kept / "model.safetensors"])
    if rank_and_size()[0] == 0:
        if not known.exists():
            save_hf(shipped, kept)
            _write_down(work, "start", shipped)
        elif weights_hash(shipped) not in json.loads(known.read_text()).values():
            raise UserError(
                "output_dir/target is neither the model whose rounds lie in"
                f" {work} nor what was made of it: give another work_dir, or delete {work}"
            )
    wait_for_all()
    return kept


def _write_finished(work: Path, model: LanguageModel, out: Path) -> None:
    model = model.bfloat16().float()  # as the file holds them
    _write_down(work, "written", model)
    save_hf(model, out / "target")


def _write_down(work: Path, name: str, model: LanguageModel) -> None:
    """Adds a model's hash to models.json, by which a repeated command knows it."""
    path = work / "models.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    write_json(path, {**known, name: weights_hash(model)})


def _keep(run: Pretraining, folder: Path, samples: npt.NDArray[Any]) -> None:
    """Trains a round to its end and writes its model; every process returns after that."""
    repeated_share = float((samples >= run.model.shape.vocab_size).mean())
    run.report(0.0, f"{repeated_share:.1%} of the samples repeat")
    trained = run.run()
    if rank_and_size()[0] == 0:
        record_run(run, folder / "training.json", {"repeated_share": round(repeated_share, 4)})
        save_hf(trained, folder / "model")  # last: it says that the round is complete
    wait_for_all()


def _record(path: Path, folder: Path, rounds: int, blend: float) -> None:
    """Adds the rounds to the record of the target's training."""
    record = json.loads(path.read_text()) if path.exists() else {}
    done = [json.loads((folder / str(n) / "training.json").read_text()) for n in range(rounds)]
    keys = ("steps", "tokens", "minutes", "repeated_share", "windows")
    finish = {"blend": blend, "rounds": [{key: one[key] for key in keys} for one in done]}
    write_json(path, record | {"finish": finish})
