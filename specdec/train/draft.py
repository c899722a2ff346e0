"""Distillation of the draft from the target, and n-gram samples of the draft."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.numpy import save
from torch import Tensor

from specdec.errors import UserError
from specdec.files import write_bytes
from specdec.parts.fields import Positive, Share, validated
from specdec.train.lm import Loss, Pretraining, keep_settings
from specdec.train.model import LanguageModel, compiled_if, weights_hash, with_layers
from specdec.train.plan import RunPlan
from specdec.train.recipes import Teacher, read_teacher, save_member, train_and_save
from specdec.train.samples import docstring_end, function_prompts, sample_documents, sequence_end
from specdec.train.session import Report, Session, rank_and_size, wait_for_all
from specdec.train.streams import Mixture, load_streams, save_streams


def divergence(draft_NV: Tensor, target_NV: Tensor) -> Tensor:
    """Returns the mean KL(target || draft) in nats per position, from float32 logits."""
    log_draft, log_target = F.log_softmax(draft_NV, dim=-1), F.log_softmax(target_NV, dim=-1)
    return F.kl_div(log_draft, log_target, reduction="batchmean", log_target=True)


@validated
@dataclass
class DistillationLoss(Loss):
    """KL divergence from a frozen target's distribution to the draft's, on the same inputs.

    Both distributions are taken at one temperature (Hinton et al. 2015, section 2); below 1 it
    weights the target's likeliest tokens, which decide acceptance, above the tail. ``text_weight``
    is the share of the text's cross entropy.
    """

    target: LanguageModel
    text_weight: Share = 0.0
    temperature: Positive = 1.0

    def __post_init__(self) -> None:
        self.target.requires_grad_(False)
        self.divergence = compiled_if(self.target.compiled, divergence)

    def __call__(self, draft: LanguageModel, inputs_BS: Tensor, targets_BS: Tensor) -> Tensor:
        with torch.no_grad():
            target_logits = self.target(inputs_BS).flatten(0, 1)
        draft_logits = draft(inputs_BS).flatten(0, 1)
        loss = self.divergence(draft_logits / self.temperature, target_logits / self.temperature)
        if self.text_weight:
            text = F.cross_entropy(draft_logits, targets_BS.flatten())
            loss = (1.0 - self.text_weight) * loss + self.text_weight * text
        return loss


def _docstring_prompts(teacher: Teacher, limit: int, seed: int) -> list[np.ndarray]:
    quotes = [i for text, i in teacher.tokenizer.get_vocab().items() if '"""' in text]
    end = partial(docstring_end, quote_ids=quotes)
    documents = teacher.streams["function"]
    return function_prompts(documents, end, limit, seed, end=teacher.model.ends[0])


def sample_target(
    target: Teacher,
    sampling: dict[str, Any],
    work: Path,
    *,
    seed: int,
    report: Report,
    mark: Callable[[np.ndarray], np.ndarray] | None = None,
) -> np.ndarray:
    """Samples the target's own continuations of training functions' signatures and docstrings.

    Each process of a group samples its share of the prompts into a file of the folder ``work`` and
    returns all samples; a later call with the same target and settings reads the files.
    ``sampling`` also has the numbers of prompts of the streams "function" (``prompts``) and "gsm8k"
    (``gsm8k_prompts``); for the rest see ``sample_documents``.

    Raises:
        UserError: the folder has samples of another target or of other settings.
    """
    rank, size = rank_and_size()
    paths = [work / f"samples-{part}.npz" for part in range(size)]
    settings = {"target": weights_hash(target.model), "sampling": sampling, "seed": seed}
    keep_settings(work / "sampling.json", settings | {"processes": size}, paths)
    if not all(path.exists() for path in paths):
        prompts = _docstring_prompts(target, sampling["prompts"], seed)
        questions, limit = target.streams.get("gsm8k"), sampling["gsm8k_prompts"]
        if limit and questions is not None:
            end = partial(sequence_end, ids=target.tokenizer.encode("\nAnswer:").ids)
            prompts += function_prompts(questions, end, limit, seed, end=target.model.ends[0])
        samples = sample_documents(
            target.model, prompts[rank::size], sampling, seed=seed + rank, mark=mark, report=report
        )
        save_streams({"samples": samples}, paths[rank])
        wait_for_all()
    return np.concatenate([load_streams(path)["samples"] for path in paths])


def train_draft(
    session: Session,
    *,
    target_layers: list[int],
    sampling: dict[str, Any],
    distill_weights: dict[str, float],
    distill_plan: dict[str, Any],
    text_weight: Share,
    temperature: Positive,
) -> None:
    """Distils the draft from output_dir/target into output_dir/draft.

    The draft's initial weights are the target's embedding and some of its layers, which saves
    hundreds of steps compared with random weights. Arguments: conf/train/draft.yaml.
    """
    work, folder = session.work / "draft", session.out / "draft"
    seed, report = session.seed, session.report
    schedule = RunPlan.of(distill_plan, "distill_plan")
    target = read_teacher(session)
    draft = with_layers(target.model, target_layers).to(session.place)
    schedule.check(draft.shape)
    about = {"text_weight": text_weight, "temperature": temperature}
    loss = DistillationLoss(target.model, **about)
    samples = sample_target(target, sampling, work, seed=seed, report=report)
    streams = {**target.streams, "samples": samples}
    settings = {"target": weights_hash(target.model), "target_layers": target_layers, **about}
    mixture, held_out = Mixture(streams, distill_weights, seed + 1), streams["held_out"]
    run = Pretraining(draft, mixture, schedule, work, held_out, loss, settings, report)
    extra = {"sampled_tokens": len(samples), "target_layers": target_layers}
    save_draft = partial(save_member, folder=folder, tokenizer=session.out / "target")
    train_and_save(run, folder / "training.json", save_draft, extra)


def sample_ngram(session: Session, *, sampling: dict[str, Any], max_tokens: int) -> None:
    """Samples token sequences from the draft for n-gram counts.

    Writes output_dir/ngram/samples.safetensors: int16 "tokens", each document after a token 0; a
    vocabulary with ids above 32767 is refused. Arguments: conf/train/ngram.yaml.
    """
    draft, seed = read_teacher(session, "draft"), session.seed
    if draft.model.shape.vocab_size > 32768:
        raise UserError(f"vocabulary of {draft.model.shape.vocab_size} does not fit 16 bits")
    prompts, report = _docstring_prompts(draft, sampling["prompts"], seed), session.report
    tokens = sample_documents(
        draft.model, prompts, sampling, seed=seed, keep_prompt=False, report=report
    )
    data = save({"tokens": tokens[:max_tokens].astype(np.int16)})
    write_bytes(session.out / "ngram" / "samples.safetensors", data)
