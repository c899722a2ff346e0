"""Finishing the target: loops in its own samples are made unlikely.

A small model repeats itself: what it has just said makes saying it again likelier. Likelihood of
text alone hardly cures that, since text has few loops to learn from; the model's own samples have
many. The objective is sequence-level unlikelihood (Welleck et al., "Neural Text Generation with
Unlikelihood Training", ICLR 2020, section 5.2), beside plain cross entropy on text.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import Tensor

from specdec.metrics.loops import repeated_ngrams
from specdec.train.draft import sample_target
from specdec.train.lm import Pretraining, Report
from specdec.train.model import LanguageModel, load_hf, save_hf
from specdec.train.parallel import rank_and_size, spawned, wait_for_all
from specdec.train.recipes import make_plan, need, pick_device, record_run, set_up, write_json
from specdec.train.streams import Mixture, load_streams

SMALLEST = 1e-6
"""Floor of 1 - p, which float32 rounds to zero in a settled loop."""


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
        ValueError: share is outside [0, 1].
    """
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"blend must be in [0, 1], got {share}")
    new = last.state_dict()
    mixed = {name: value.lerp(new[name], share) for name, value in first.state_dict().items()}
    first.load_state_dict(mixed)
    return first


class UnlikelihoodLoss:
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
            ValueError: a weight that is not positive.
        """
        if weight <= 0:
            raise ValueError(f"the unlikelihood weight must be positive, got {weight}")
        self.samples, self.weight, self.batch, self.length = samples, weight, batch, length

    def __call__(self, model: LanguageModel, inputs_BS: Tensor, targets_BS: Tensor) -> Tensor:
        """Scalar loss in nats per token."""
        inputs, targets = self.samples.batch(self.batch, self.length)
        rank, size = rank_and_size()
        inputs, targets = inputs[rank::size].to(model.device), targets[rank::size].to(model.device)
        vocab_size = model.shape.vocab_size
        repeated = targets >= vocab_size
        logits = model(inputs % vocab_size)
        log_p = logits.gather(-1, (targets % vocab_size)[..., None])[..., 0] - logits.logsumexp(-1)
        rest = (-torch.expm1(log_p)).clamp_min(SMALLEST)
        unlikelihood = -(rest.log() * repeated).mean()
        return model.loss(inputs_BS, targets_BS) + self.weight * unlikelihood


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
    dtype = set_up(num_threads, precision)
    streams = load_streams(need(work / "tokens.npz", "tokenizer"))
    start = need(out / "target" / "model.safetensors", "target").parent
    folder = first = _first_weights(start, work / "finish" / "start")
    for number in range(rounds):
        here = work / "finish" / str(number)
        if not (here / "model" / "model.safetensors").exists():
            model = load_hf(folder, dtype=dtype, compiled=compiled).to(place)
            samples = sample_target(
                work=here,
                target=model,
                tokenizer=Tokenizer.from_file(str(start / "tokenizer.json")),
                streams=streams,
                sampling=sampling,
                seed=seed + number,
                mark=partial(mark_repeated, vocab_size=model.shape.vocab_size, ngram=ngram),
                report=report,
            )
            run = Pretraining(
                model,
                Mixture(streams, weights, seed + number),
                make_plan(plan),
                here,
                held_out=streams["held_out"],
                loss=UnlikelihoodLoss(_alone(samples, seed), **unlikelihood),
                report=report,
            )
            _keep(run, here, samples)
        folder = here / "model"
    if rank_and_size()[0] == 0:
        save_hf(between(load_hf(first), load_hf(folder), blend), out / "target")
        _record(out / "target" / "training.json", work / "finish", rounds, blend)


def _first_weights(shipped: Path, kept: Path) -> Path:
    if rank_and_size()[0] == 0 and not kept.exists():
        save_hf(load_hf(shipped), kept)
    wait_for_all()
    return kept


def _alone(samples: npt.NDArray[Any], seed: int) -> Mixture:
    return Mixture({"samples": samples}, {"samples": 1.0}, seed)


def _keep(run: Pretraining, folder: Path, samples: npt.NDArray[Any]) -> None:
    """Trains a round to its end and writes its model; every process returns after that."""
    repeated_share = float((samples >= run.model.shape.vocab_size).mean())
    run.report(0.0, f"{repeated_share:.1%} of the samples repeat")
    trained = run.run()
    if rank_and_size()[0] == 0:
        save_hf(trained, folder / "model")
        record_run(run, folder / "training.json", {"repeated_share": round(repeated_share, 4)})
    wait_for_all()


def _record(path: Path, folder: Path, rounds: int, blend: float) -> None:
    """Adds the rounds to the record of the target's training."""
    record = json.loads(path.read_text()) if path.exists() else {}
    done = [json.loads((folder / str(n) / "training.json").read_text()) for n in range(rounds)]
    keys = ("steps", "tokens", "minutes", "repeated_share")
    finish = {"blend": blend, "rounds": [{key: one[key] for key in keys} for one in done]}
    write_json(path, record | {"finish": finish})
