"""Distillation: a draft learns the target's next-token distribution (Kullback-Leibler)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.errors import UserError
from specdec.train.lm import Loss
from specdec.train.model import LanguageModel, compiled_if


def divergence(draft_NV: Tensor, target_NV: Tensor) -> Tensor:
    """Mean KL(target || draft) in nats per position, from float32 logits."""
    log_draft, log_target = F.log_softmax(draft_NV, dim=-1), F.log_softmax(target_NV, dim=-1)
    return F.kl_div(log_draft, log_target, reduction="batchmean", log_target=True)


class DistillationLoss(Loss):
    """KL divergence from a frozen target's distribution to the draft's, on the same inputs.

    Both distributions are taken at one temperature (Hinton et al. 2015, section 2); below 1 it
    weights the target's likeliest tokens, which decide acceptance, above the tail.
    """

    def __init__(
        self, target: LanguageModel, *, text_weight: float = 0.0, temperature: float = 1.0
    ) -> None:
        """Freezes the target; the loss is compiled if the target is.

        Args:
            target: the teacher.
            text_weight: share, in [0, 1], of the text's cross entropy in the loss.
            temperature: of both distributions, positive.

        Raises:
            UserError: text_weight or temperature is out of range.
        """
        if not 0.0 <= text_weight <= 1.0:
            raise UserError(f"text_weight must be in [0, 1], got {text_weight}")
        if temperature <= 0:
            raise UserError(f"temperature must be positive, got {temperature}")
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
