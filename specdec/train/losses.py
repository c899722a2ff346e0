"""The losses by which drafters learn the target's own distribution at each position.

Shape letters: N positions, V vocabulary, U draft vocabulary (equal to V without one).
"""

from dataclasses import dataclass
from enum import StrEnum

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.parts.fields import Count, NotNegative, Positive, validated


class Objective(StrEnum):
    """The loss of a position with target probabilities p and draft probabilities q.

    ``DIVERGENCE``: KL(p || q), with p renormalised over the draft vocabulary; positions whose
    likeliest token is outside of it do not count. Its gradient is that of EAGLE-3's cross entropy.
    ``ACCEPTANCE``: 1 - sum(min(p, q)), the share of draft tokens that speculative sampling rejects
    (Leviathan et al. 2023, theorem 3.5); p is not renormalised.
    """

    DIVERGENCE = "divergence"
    ACCEPTANCE = "acceptance"


@validated
@dataclass(frozen=True, slots=True, kw_only=True)
class LossOptions:
    """Options of the loss: the section ``loss`` of a training configuration.

    Attributes:
        target_weight: weight of the objective (PPSD's lambda, D.1, with a label_weight of 1).
        label_weight: weight of the cross entropy of the text's own tokens.
        temperature: divides both models' logits. Values below 1 give more weight to the likeliest
            tokens, which decide acceptance in greedy verification.
        every: the loss uses one position in this many, at an offset that changes each step, which
            saves products with the output matrix.
    """

    objective: Objective = Objective.DIVERGENCE
    target_weight: NotNegative = 1.0
    label_weight: NotNegative = 0.0
    temperature: Positive = 1.0
    every: Count = 1


class Goal:
    """The target's distributions at N positions over the draft tokens ``ids``, int64[U] or all."""

    def __init__(self, target_NV: Tensor, ids: Tensor | None, options: LossOptions) -> None:
        self._options, self._ids = options, ids
        target_NV = target_NV.float() / options.temperature
        kept_NU = target_NV if ids is None else target_NV[:, ids]
        self._counts: Tensor | None = None  # float32[N], 0 where the likeliest token is missing
        if options.objective == Objective.ACCEPTANCE:
            self._log_p = kept_NU - target_NV.logsumexp(-1, keepdim=True)
            self._inside = torch.ones_like(target_NV[:, 0])
            return
        self._log_p = kept_NU.log_softmax(-1)
        self._inside = (kept_NU.logsumexp(-1) - target_NV.logsumexp(-1)).exp()
        if ids is not None:
            self._counts = (kept_NU.amax(-1) == target_NV.amax(-1)).float()

    def loss(self, draft_NU: Tensor, labels_N: Tensor, rows: Tensor | slice) -> Tensor:
        """Returns the loss of draft logits ``draft_NU`` at this goal's positions ``rows``.

        ``labels_N`` has the text's token at each of these positions.
        """
        options, log_p = self._options, self._log_p[rows]
        log_q = (draft_NU.float() / options.temperature).log_softmax(-1)
        if options.objective == Objective.ACCEPTANCE:
            loss = 1.0 - torch.minimum(log_p.exp(), log_q.exp()).sum(-1).mean()
        else:
            losses_N = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
            loss = _mean(losses_N, None if self._counts is None else self._counts[rows])
        loss = options.target_weight * loss
        if options.label_weight:
            loss = loss + options.label_weight * self._label_loss(log_q, labels_N)
        return loss

    def probs(self, rows: Tensor) -> Tensor:
        """Returns the target's probabilities of the draft vocabulary, [N, U], not renormalised."""
        return self._log_p[rows].exp() * self._inside[rows, None]

    def _label_loss(self, log_q_NU: Tensor, labels_N: Tensor) -> Tensor:
        if self._ids is None:
            return F.nll_loss(log_q_NU, labels_N)
        places = torch.searchsorted(self._ids, labels_N).clamp(max=len(self._ids) - 1)
        inside = (self._ids[places] == labels_N).float()
        return _mean(-log_q_NU.gather(-1, places[:, None])[:, 0], inside)


def _mean(losses_N: Tensor, counts_N: Tensor | None) -> Tensor:
    """Returns the mean over the positions that count, 0 if none does."""
    if counts_N is None:
        return losses_N.mean() if len(losses_N) else losses_N.sum()
    return (losses_N * counts_N).sum() / counts_N.sum().clamp(min=1)
