"""Losses of the training-time test of EAGLE heads (see ``models.eagle_unroll``).

Shape letters: B sequences, S positions, A chosen rows, E hidden size, F size of a feature, V
vocabulary, U draft vocabulary, N = B A.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from specdec.errors import UserError
from specdec.models.eagle import EagleHead
from specdec.models.eagle_unroll import unroll
from specdec.parts.fields import Count, Index, Positive, PositiveShare, validated
from specdec.train.lm import Loss
from specdec.train.target import Target


class Objective(StrEnum):
    """The loss of one step, given target probabilities p and the head's probabilities q.

    ``CROSS_ENTROPY``: that of q with p renormalised over the draft vocabulary (EAGLE-3); positions
    whose likeliest token is outside this vocabulary do not count. ``ACCEPTANCE``: 1 - sum(min(p,
    q)), the share of draft tokens that speculative sampling rejects (Leviathan et al. 2023, theorem
    3.5).
    """

    CROSS_ENTROPY = "cross_entropy"
    ACCEPTANCE = "acceptance"


def wanted(
    objective: Objective, target_BSV: Tensor, ids_U: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Returns target probabilities [B, S, U] and which positions count [B, S], for ``step_loss``.

    For ACCEPTANCE the probabilities are not renormalised, so a position's sum is below 1. None
    means that all positions count.
    """
    if ids_U is None:
        return target_BSV.softmax(-1), None
    kept_BSU = target_BSV[..., ids_U]
    if objective == Objective.ACCEPTANCE:
        return (kept_BSU - target_BSV.logsumexp(-1, keepdim=True)).exp(), None
    return kept_BSU.softmax(-1), kept_BSU.amax(-1) == target_BSV.amax(-1)


def step_loss(
    objective: Objective, draft_NU: Tensor, p_NU: Tensor, counts_N: Tensor | None
) -> Tensor:
    """Returns the mean loss of the positions that count, 0 if none does; logits are float32."""
    if objective == Objective.ACCEPTANCE:
        return 1.0 - torch.minimum(p_NU, draft_NU.softmax(-1)).sum(-1).mean()
    inner_N = torch.bmm(p_NU[:, None], draft_NU[..., None]).flatten()  # p sums to 1
    losses_N = draft_NU.logsumexp(-1) - inner_N
    if counts_N is None:
        return losses_N.mean()
    return (losses_N * counts_N).sum() / counts_N.sum().clamp(min=1)


@validated
@dataclass
class TrainingTimeTest(Loss):
    """Loss of an EAGLE head whose own outputs are fed back; the target is frozen.

    Attributes:
        decay: step i weighs decay ** i; 0.8 in the paper's code. Weights are normalised.
        temperature: temperature of both distributions; 1 in the paper.
        every: steps after the first use one row in this many, at an offset that changes each call.
            1 in the paper.
        remember: largest number of sequences whose hidden states are cached, in the compute dtype,
            so that the target does not run again when they return.
    """

    target: Target
    steps: Count = 7
    decay: PositiveShare = 0.8
    objective: Objective = Objective.CROSS_ENTROPY
    temperature: Positive = 1.0
    every: Count = 1
    remember: Index = 0

    def __post_init__(self) -> None:
        self.target.requires_grad_(False)
        self._calls = 0
        self._kept: dict[bytes, tuple[Tensor, Tensor]] = {}  # token ids -> features, last stream

    def __call__(self, head: Any, inputs_BS: Tensor, targets_BS: Tensor) -> Tensor:
        last = inputs_BS.shape[1] - self.steps  # rows whose tokens and targets all exist
        if last < self.every:
            raise UserError(
                f"sequences of {inputs_BS.shape[1]} positions are too short for steps={self.steps}"
                f" and every={self.every}"
            )
        first = self._calls % self.every
        self._calls += 1
        rows_A = torch.arange(first, last, self.every, device=inputs_BS.device)
        with torch.no_grad():
            features, last_BSE = self._read(head, inputs_BS)
            logits_BSV = self.target.logits(last_BSE) / self.temperature
            p_BSU, counts_BS = wanted(self.objective, logits_BSV, head.target_ids)
        weights = torch.tensor([self.decay**step for step in range(self.steps)])
        total = inputs_BS.new_zeros((), dtype=torch.float32)
        with self.target.autocast():
            unrolled = unroll(head, inputs_BS, features, self.steps, rows_A)
            for step, (weight, outputs) in enumerate(zip(weights, unrolled, strict=True)):
                at = rows_A + 1 + step if step else slice(1, None)
                loss = step_loss(
                    self.objective,
                    head.logits(outputs).float().flatten(0, 1) / self.temperature,
                    p_BSU[:, at].flatten(0, 1),
                    None if counts_BS is None else counts_BS[:, at].flatten(),
                )
                total = total + weight * loss
        return total / weights.sum()

    def _read(self, head: EagleHead, inputs_BS: Tensor) -> tuple[Tensor, Tensor]:
        if not self.remember:
            return read_target(self.target, head, inputs_BS)
        rows = []
        # One at a time: in a batch the bits of a row depend on how many rows miss the cache.
        for row_1S in inputs_BS.split(1):
            key = row_1S.cpu().numpy().tobytes()
            read = self._kept.get(key)
            if read is None:
                features, last_1SE = read_target(self.target, head, row_1S)
                read = (
                    features.to(self.target.compute_dtype),
                    last_1SE.to(self.target.compute_dtype),
                )
                if len(self._kept) < self.remember:
                    self._kept[key] = read
            rows.append(read)
        features, last_BSE = (torch.cat(parts) for parts in zip(*rows, strict=True))
        return features, last_BSE.float()

    def state(self) -> dict[str, int]:
        return {"calls": self._calls}

    def restore(self, state: dict[str, int]) -> None:
        self._calls = state["calls"]


def read_target(target: Target, head: EagleHead, tokens_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the features [B, S, F] that a head reads, and the last layer's output [B, S, E]."""
    depth = target.shape.num_layers
    streams = target.residuals(tokens_BS, {layer + 1 for layer in head.config.layers})
    parts = [streams[layer + 1] for layer in head.config.layers]
    return torch.cat(parts, -1), streams[depth]
