"""The draft, distilled from the target, and its n-gram samples: loss and recipes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.numpy import save
from torch import Tensor

from specdec.errors import UserError
from specdec.files import write_bytes
from specdec.parts.build import build
from specdec.parts.fields import Positive, Share, validated
from specdec.train.lm import Loss, Pretraining, Report
from specdec.train.model import LanguageModel, compiled_if, with_layers
from specdec.train.parallel import rank_and_size, wait_for_all
from specdec.train.plan import RunPlan
from specdec.train.recipes import Teacher, read_teacher, train_and_save
from specdec.train.resuming import keep_settings, weights_hash
from specdec.train.samples import (
    Sampling,
    docstring_end,
    function_prompts,
    sample_documents,
    sequence_end,
)
from specdec.train.session import Session
from specdec.train.streams import Mixture, load_streams, save_streams


def divergence(draft_NV: Tensor, target_NV: Tensor) -> Tensor:
    """Mean KL(target || draft) in nats per position, from float32 logits."""
    log_draft, log_target = F.log_softmax(draft_NV, dim=-1), F.log_softmax(target_NV, dim=-1)
    return F.kl_div(log_draft, log_target, reduction="batchmean", log_target=True)


class DistillationLoss(Loss):
    """KL divergence from a frozen target's distribution to the draft's, on the same inputs.

    Both distributions are taken at one temperature (Hinton et al. 2015, section 2); below 1 it
    weights the target's likeliest tokens, which decide acceptance, above the tail.
    """

    @validated
    def __init__(
        self, target: LanguageModel, *, text_weight: Share = 0.0, temperature: Positive = 1.0
    ) -> None:
        """Freezes the target; the loss is compiled if the target is.

        Args:
            target: the teacher.
            text_weight: share of the text's cross entropy in the loss.
            temperature: of both distributions.
        """
        self.target, self.text_weight = target.requires_grad_(False), text_weight
        self.temperature = temperature
        self.divergence = compiled_if(target.compiled, divergence)

    def __call__(self, draft: LanguageModel, inputs_BS: Tensor, targets_BS: Tensor) -> Tensor:
        """Scalar loss in nats per token."""
        with torch.no_grad():
            target_logits = self.target(inputs_BS).flatten(0, 1)
        draft_logits = draft(inputs_BS).flatten(0, 1)
        loss = self.divergence(draft_logits / self.temperature, target_logits / self.temperature)
        if self.text_weight:
            text = F.cross_entropy(draft_logits, targets_BS.flatten())
            loss = (1.0 - self.text_weight) * loss + self.text_weight * text
        return loss


def sampling_rules(sampling: dict[str, Any]) -> list[Sampling]:
    """Builds the rules of a `sampling` section."""
    return [build(Sampling, rule, "sampling.rules") for rule in sampling["rules"]]


def docstring_prompts(teacher: Teacher, limit: int, seed: int) -> list[np.ndarray]:
    """Signatures and docstrings of training functions, as prompts."""
    quotes = [i for text, i in teacher.tokenizer.get_vocab().items() if '"""' in text]
    return function_prompts(teacher.streams["function"], docstring_end(quotes), limit, seed)


def sample_target(
    target: Teacher,
    *,
    work: Path,
    sampling: dict[str, Any],
    seed: int,
    report: Report,
    mark: Callable[[np.ndarray], np.ndarray] | None = None,
) -> np.ndarray:
    """Samples the target's own continuations of training functions' signatures and docstrings.

    Each process of a group samples its share of the prompts and returns all samples.

    Args:
        target: the sampled model; prompts come from its streams "function" and "gsm8k".
        work: folder of the result, one file per process; a second call with the same target and
            settings reads it.
        sampling: keys prompts, gsm8k_prompts, new_tokens, batch, minutes, rules (see Sampling).
        seed: of prompts and draws.
        report: progress.
        mark: applied to the ids of each continuation.

    Returns:
        Token ids, documents each preceded by token 0.

    Raises:
        UserError: the folder has samples of another target or of other settings.
    """
    rank, size = rank_and_size()
    paths = [work / f"samples-{part}.npz" for part in range(size)]
    settings = {"target": weights_hash(target.model), "sampling": sampling, "seed": seed}
    keep_settings(work / "sampling.json", settings | {"processes": size}, paths)
    if all(path.exists() for path in paths):
        return np.concatenate([load_streams(path)["samples"] for path in paths])
    prompts = docstring_prompts(target, sampling["prompts"], seed)
    gsm8k = target.streams.get("gsm8k")
    if sampling["gsm8k_prompts"] and gsm8k is not None:
        answer = target.tokenizer.encode("\nAnswer:").ids
        prompts += function_prompts(gsm8k, sequence_end(answer), sampling["gsm8k_prompts"], seed)
    samples = sample_documents(
        target.model,
        prompts[rank::size],
        sampling_rules(sampling),
        new_tokens=sampling["new_tokens"],
        batch=sampling["batch"],
        seed=seed + rank,
        minutes=sampling["minutes"],
        mark=mark,
        report=report,
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
    work, out, seed = session.work / "draft", session.out, session.seed
    schedule = RunPlan.of(distill_plan, "distill_plan")
    target = read_teacher(session)
    draft = with_layers(target.model, target_layers).to(session.place)
    schedule.check(draft.shape)
    loss = DistillationLoss(target.model, text_weight=text_weight, temperature=temperature)
    samples = sample_target(target, work=work, sampling=sampling, seed=seed, report=session.report)
    streams = {**target.streams, "samples": samples}
    run = Pretraining(
        draft,
        Mixture(streams, distill_weights, seed + 1),
        schedule,
        work,
        loss=loss,
        held_out=streams["held_out"],
        settings={
            **{"target": weights_hash(target.model), "target_layers": target_layers},
            **{"text_weight": text_weight, "temperature": temperature},
        },
        report=session.report,
    )
    extra = {"sampled_tokens": len(samples), "target_layers": target_layers}
    train_and_save(run, out / "draft", tokenizer=out / "target", extra=extra)


def sample_ngram(session: Session, *, sampling: dict[str, Any], max_tokens: int) -> None:
    """Samples token sequences from the draft for n-gram counts.

    Writes output_dir/ngram/samples.safetensors: int16 "tokens", documents each preceded by token 0.
    Arguments: conf/train/ngram.yaml.

    Raises:
        UserError: the vocabulary has ids above 32767, which int16 cannot hold.
    """
    draft = read_teacher(session, "draft")
    if draft.model.shape.vocab_size > 32768:
        raise UserError(f"vocabulary of {draft.model.shape.vocab_size} does not fit 16 bits")
    tokens = sample_documents(
        draft.model,
        docstring_prompts(draft, sampling["prompts"], session.seed),
        sampling_rules(sampling),
        new_tokens=sampling["new_tokens"],
        batch=sampling["batch"],
        seed=session.seed,
        minutes=sampling["minutes"],
        keep_prompt=False,
        report=session.report,
    )[:max_tokens]
    data = save({"tokens": tokens.astype(np.int16)})
    write_bytes(session.out / "ngram" / "samples.safetensors", data)
