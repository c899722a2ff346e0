"""Distillation: a draft learns the target's next-token distribution (Kullback-Leibler)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.errors import UserError
from specdec.train.lm import Loss, Report, silent
from specdec.train.model import LanguageModel
from specdec.train.samples import Sampling, generate, same_length_batches
from specdec.train.streams import compact


def divergence(draft_NV: Tensor, target_NV: Tensor) -> Tensor:
    """Mean KL(target || draft) in nats per position, from float32 logits."""
    log_target = F.log_softmax(target_NV, dim=-1)
    log_draft = F.log_softmax(draft_NV, dim=-1)
    return (log_target.exp() * (log_target - log_draft)).sum(-1).mean()


class DistillationLoss(Loss):
    """Loss for lm.Pretraining: KL to a frozen target on the same inputs.

    A share `text_weight` of the loss is the ordinary cross entropy on the text's own next tokens.
    Both distributions are taken at one temperature (Hinton et al. 2015, section 2); below 1 it
    weighs the target's likeliest tokens, which decide acceptance, above the tail.
    """

    def __init__(
        self,
        target: LanguageModel,
        *,
        text_weight: float = 0.0,
        temperature: float = 1.0,
        compiled: bool = False,
    ) -> None:
        """Takes the frozen target, the weight of the text's cross entropy and the temperature.

        Raises:
            UserError: text_weight is outside [0, 1], or temperature not positive.
        """
        if not 0.0 <= text_weight <= 1.0:
            raise UserError(f"text_weight must be in [0, 1], got {text_weight}")
        if temperature <= 0:
            raise UserError(f"temperature must be positive, got {temperature}")
        self.target, self.text_weight = target.requires_grad_(False), text_weight
        self.temperature = temperature
        self.divergence: Callable[[Tensor, Tensor], Tensor] = divergence
        if compiled:
            self.divergence = torch.compile(divergence, dynamic=False)

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


def sample_documents(
    model: LanguageModel,
    prompts: list[np.ndarray],
    samplings: Sequence[Sampling],
    *,
    new_tokens: int,
    batch: int,
    seed: int,
    minutes: float | None = None,
    keep_prompt: bool = True,
    mark: Callable[[np.ndarray], np.ndarray] | None = None,
    report: Report = silent,
) -> np.ndarray:
    """Continues prompts with a model and joins the results, each preceded by token 0.

    Args:
        model: the sampled model.
        prompts: token ids, of differing length.
        samplings: rules dealt over each batch.
        new_tokens: tokens per prompt; a continuation is cut at its own end token.
        batch: sequences at once.
        seed: order of batches, and all draws.
        minutes: stop after the batch in which this much time has passed; None uses all prompts.
        keep_prompt: whether a document begins with its prompt.
        mark: applied to the ids of each continuation.
        report: progress in [0, 1] and a line, after each batch.

    Returns:
        Ids, one dimension, as ``streams.compact`` holds them.

    Raises:
        UserError: no prompts.
    """
    if not prompts:
        raise UserError(
            "nothing to sample from: no training function or question makes a prompt here"
        )
    generator = torch.Generator().manual_seed(seed)
    groups = same_length_batches(prompts, batch)
    order = np.random.default_rng(seed).permutation(len(groups))
    began, pieces, count = time.monotonic(), [], 0
    for done, index in enumerate(order, start=1):
        group = groups[index]
        group = group[torch.randperm(group.shape[0], generator=generator)]
        new = generate(model, group, new_tokens, samplings, generator, stop_at_end=True)
        for prompt, row in zip(group.numpy(), new.numpy(), strict=True):
            ends = np.flatnonzero(row == 0)
            row = row[: ends[0]] if len(ends) else row
            count += len(row)
            row = row if mark is None else mark(row)
            pieces.append(np.concatenate(([0], prompt, row) if keep_prompt else ([0], row)))
        minutes_used = (time.monotonic() - began) / 60
        share = done / len(order)
        share = share if minutes is None else max(share, minutes_used / minutes)
        report(min(1.0, share), f"{count} tokens sampled")
        if minutes is not None and minutes_used >= minutes:
            break
    return compact(np.concatenate(pieces))
