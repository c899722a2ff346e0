"""Training-time test of EAGLE heads (EAGLE-3, arXiv 2503.01840, section 3.2), and its losses.

At step 0 the head reads the target's features at every position. At step s it reads, at chosen
positions, its own outputs of step s - 1 and the text's next token, as in decoding; it attends to
the rows of step 0 up to its position and to its own rows of the steps between.

Shape letters: B sequences, S positions, T = S - 1 rows, A chosen rows, E hidden size, V vocabulary,
U draft vocabulary, N = B A, H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.errors import UserError
from specdec.models.eagle import EagleHead, causal
from specdec.parts.fields import Count, Index, Positive, PositiveShare, validated
from specdec.train.lm import Loss
from specdec.train.model import LanguageModel


class _Unrolled:
    """Attention of the steps; see ``models.eagle.Attend``."""

    def __init__(self) -> None:
        self._first: dict[int, tuple[Tensor, Tensor]] = {}  # layer -> keys, values of step 0
        self._own: dict[int, list[tuple[Tensor, Tensor]]] = {}  # of later steps, by layer
        self._visible_AT: Tensor | None = None

    def first(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Step 0: causal over the rows, which later steps read."""
        self._first[layer], self._own[layer] = (key, value), []
        return causal(layer, query, key, value)

    def choose(self, rows_A: Tensor) -> None:
        """Later steps have these rows, each of which sees those of step 0 up to itself."""
        length = next(iter(self._first.values()))[0].shape[2]
        columns_T = torch.arange(length, device=rows_A.device)
        self._visible_AT = columns_T <= rows_A[:, None]

    def later(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """A step s > 0: rows of step 0, and each row's own of steps 1 to s."""
        keys, values = self._first[layer]
        own = self._own[layer]
        own.append((key, value))
        query = query.unflatten(1, (keys.shape[1], -1)) / query.shape[-1] ** 0.5  # B G H/G A D
        scores = query @ keys[:, :, None].transpose(-1, -2)
        assert self._visible_AT is not None
        scores = scores.masked_fill(~self._visible_AT, -torch.inf)
        along = [(query * k[:, :, None]).sum(-1, keepdim=True) for k, _ in own]
        weights = torch.cat([scores, *along], -1).float().softmax(-1).to(values.dtype)
        length = keys.shape[2]
        out = weights[..., :length] @ values[:, :, None]
        for step, (_, v) in enumerate(own):
            out = out + weights[..., length + step, None] * v[:, :, None]
        return out.flatten(1, 2).transpose(1, 2)


def unroll(
    head: EagleHead, tokens_BS: Tensor, features: Tensor, steps: int, rows_A: Tensor | None = None
) -> Iterator[Tensor]:
    """Yields the head's outputs of each step, the text's tokens being fed throughout.

    Row i of step s embeds token i + 1 + s and predicts the one after it, with the target's features
    up to position i. At step 0 there are rows for all positions but the last.

    Args:
        head: any head.
        tokens_BS: int64[B, S].
        features: [B, S, F], hidden states ``head.config.names`` of the target, concatenated.
        steps: number of steps, at least 1.
        rows_A: int64[A], rows of the later steps; each at most S - 1 - steps. Default: all such.

    Returns:
        [B, T, E] for step 0, then [B, A, E] per step.
    """
    attention = _Unrolled()
    length = tokens_BS.shape[1] - 1
    positions = torch.arange(length, device=tokens_BS.device)
    if rows_A is None:
        rows_A = positions[: length + 1 - steps]
    states = head.states(features[:, :-1])
    outputs = head(tokens_BS[:, 1:], states, positions[None], attention.first)
    yield outputs
    attention.choose(rows_A)
    outputs = outputs[:, rows_A]
    for step in range(1, steps):
        states, at = head.fed_back(outputs), rows_A + step
        outputs = head(tokens_BS[:, at + 1], states, at[None], attention.later)
        yield outputs


class Objective(StrEnum):
    """What a step minimises, given target probabilities p and the head's q.

    ``CROSS_ENTROPY``: that of q with p renormalised over the draft vocabulary (EAGLE-3); positions
    whose likeliest token lies outside it are left out. ``ACCEPTANCE``: 1 - sum(min(p, q)), the
    share of drafts that speculative sampling refuses (Leviathan et al. 2023, theorem 3.5).
    """

    CROSS_ENTROPY = "cross_entropy"
    ACCEPTANCE = "acceptance"


def wanted(
    objective: Objective, target_BSV: Tensor, ids_U: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """What ``step_loss`` compares with: probabilities [B, S, U] and which positions count, [B, S].

    Args:
        objective: defines whether the probabilities of a position sum to 1.
        target_BSV: the target's logits, float32.
        ids_U: ids of the draft vocabulary; None: all tokens, and all positions count.
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
    """Mean loss of positions, of float32 logits and of what ``wanted`` returned; 0 of no position."""
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
        target: gives features and distributions.
        steps: of the training-time test; 7 in the paper's code.
        decay: step i weighs decay ** i; 0.8 in the paper's code. Weights are normalised.
        objective: an ``Objective``.
        temperature: of both distributions; 1 in the paper.
        every: steps after the first use one row in this many, at an offset that changes each call.
            1 in the paper.
        remember: largest number of sequences whose hidden states are kept in memory, in the compute
            dtype, so that the target does not run again when they return. 0 keeps none.
    """

    target: LanguageModel
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
        """As ``read_target``, from memory where possible."""
        if not self.remember:
            return read_target(self.target, head, inputs_BS)
        rows = []
        # One at a time: results in a batch depend on its size, and so on what is kept.
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


def read_target(target: LanguageModel, head: EagleHead, tokens_BS: Tensor) -> tuple[Tensor, Tensor]:
    """The features [B, S, F] that a head reads, and the stream after the last layer, [B, S, E]."""
    depth = target.shape.num_layers
    streams = target.residuals(tokens_BS, {layer + 1 for layer in head.config.layers})
    parts = [streams[layer + 1] for layer in head.config.layers]
    return torch.cat(parts, -1), streams[depth]
