"""The sampling transform in torch, for logits on an accelerator.

It computes the same distributions and draws as ``host``. Rows of logits stay on the device; the
uniforms are sent there, and tokens are copied back. Sums are trees of elementwise additions,
because libraries choose the order of a reduction by the shape of the whole call, and a row's last
bits would then depend on the other rows. All other operations are comparisons and integer
arithmetic, so that results equal the host's except for draws within a rounding error of an edge.

Only ``to_host`` waits for the device, once per call.

Shape letters: A rows, V vocabulary, S entries, B blocks, K candidates, J judged nodes, C children.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec.device import DeviceProbs, to_device, to_host
from specdec.sampling.filters import check_finite
from specdec.types import FloatArray, IntArray

BLOCK = 64
"""Entries per block in the first level of cumulative sums; a power of two."""

NUCLEUS = 1024
"""Number of most probable entries searched for top-p's cut before a whole row is sorted."""

_LEAST_SELECTED = 128  # entries with top-k
_ENTRIES = 1 << 24  # logits processed at a time: 128 MiB per float64 intermediate
_FAULTY = -1  # instead of a token, for a row that cannot be sampled

NOT_FOUND = -2
"""Instead of a token, if top-p's cut is not among the searched entries."""


def on_accelerator(tensor: Tensor) -> bool:
    """Whether this module processes the tensor, instead of ``host`` (mps has no float64)."""
    return tensor.device.type not in ("cpu", "mps")


def argmax(logits: Tensor) -> IntArray:
    """Returns int64[A]: the first of the largest entries of each row of logits[A, V]."""
    best = logits.max(dim=1)  # returns the first of equal entries
    tokens = torch.where(best.values.isfinite(), best.indices, _FAULTY)
    return checked(to_host(tokens), logits)


def sample(
    logits: Tensor, uniforms: FloatArray, *, temperature: float, top_k: int, top_p: float
) -> IntArray:
    """``host.sample`` on the device."""
    vocab_size = logits.shape[1]
    step = max(1, _ENTRIES // vocab_size)
    draws = to_device(uniforms, logits.device)
    for width in (min(NUCLEUS, vocab_size), None):
        parts = []
        for rows, row_draws in zip(logits.split(step), draws.split(step), strict=True):
            weighted = weigh(rows, temperature=temperature, top_k=top_k, top_p=top_p, width=width)
            parts.append(weighted.draw(row_draws))
        tokens = to_host(torch.cat(parts))
        if not (tokens == NOT_FOUND).any():
            break
    return checked(tokens, logits)


def checked(tokens: IntArray, logits: Tensor) -> IntArray:
    """Returns ``tokens`` after checking that none of them marks a faulty row of logits[A, V].

    Raises:
        ValueError: for rows with NaN, infinity or no allowed token.
    """
    if (tokens < 0).any():
        check_finite(to_host(logits.amax(dim=1)))
    return tokens


@dataclass(frozen=True, slots=True)
class Weighted:
    """Rows of unnormalised probabilities.

    Attributes:
        weights: float64[A, S], at most 1; 0 for tokens that the filters remove.
        best: [A], the largest logit.
        cut_found: bool[A], whether the filters' cuts were found; otherwise the row's weights are
            invalid.
        ids: int64[A, S], increasing token ids of the weights; None: S is V, all tokens in order.
    """

    weights: Tensor
    best: Tensor
    cut_found: Tensor
    ids: Tensor | None = None

    def draw(self, uniforms: Tensor) -> Tensor:
        """Returns int64[A] on the device: a token per row, or a negative number for a fault."""
        tokens = inverse_cdf(self.weights, uniforms)
        if self.ids is not None:
            tokens = self.ids.gather(1, tokens[:, None])[:, 0]
        tokens = torch.where(self.cut_found, tokens, NOT_FOUND)
        return torch.where(self.best.isfinite(), tokens, _FAULTY)

    def sample(self, uniforms: FloatArray) -> IntArray:
        """As ``Distribution.sample``; only for rows with ``cut_found``."""
        draws = to_device(uniforms, self.weights.device)
        return checked(to_host(self.draw(draws)), self.best[:, None])

    def probs(self) -> DeviceProbs:
        """Returns the normalised probabilities; only for weights of all tokens."""
        assert self.ids is None, "distributions are computed of whole rows"
        return DeviceProbs(self.weights / _total(self.weights), self.best)


def one_hot(logits: Tensor) -> Weighted:
    """Returns rows with all weight on the first of their largest entries."""
    best = logits.max(dim=1)
    weights = torch.zeros(logits.shape, dtype=torch.float64, device=logits.device)
    weights = weights.scatter(1, best.indices[:, None], 1.0)
    return Weighted(weights, best.values, torch.ones_like(best.indices, dtype=torch.bool))


def weigh(
    logits: Tensor,
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    width: int | None = None,
) -> Weighted:
    """``host.weigh`` on the device.

    Args:
        logits, temperature, top_k, top_p: see ``host.sample``.
        width: number of a row's most probable entries among which cuts are searched; with top-k,
            only those entries are processed. None: all of them, with weights of all tokens.
    """
    ids, best = None, logits.amax(dim=1)
    cut_found = everything = torch.ones_like(best, dtype=torch.bool)
    num_selected = max(_LEAST_SELECTED, 2 * top_k)
    if 0 < top_k < logits.shape[1] and num_selected <= min(width or 0, logits.shape[1]):
        selected = logits.topk(num_selected, dim=1)
        kth = selected.values[:, top_k - 1, None]
        cut_found = selected.values[:, -1] < kth[:, 0]  # else more entries may tie with the k-th
        ids, order = selected.indices.sort(dim=1)
        logits = selected.values.gather(1, order)
        logits = logits.masked_fill(logits < kth, -torch.inf)
    elif 0 < top_k < logits.shape[1]:
        kth = logits.topk(top_k, dim=1).values.amin(dim=1, keepdim=True)
        logits = logits.masked_fill(logits < kth, -torch.inf)
    weights = _weights(logits, best, temperature)
    if top_p == 1.0:
        return Weighted(weights, best, cut_found, ids)
    num_entries = logits.shape[1]
    ordered = logits.topk(min(width or num_entries, num_entries), dim=1).values
    total = _total(weights)
    # In descending order, an entry is kept if the mass from it on exceeds the mass that may be cut.
    rest = total - running_sums(_weights(ordered, best, temperature))
    next_is_kept = rest > (1.0 - top_p) * total
    num = (1 + next_is_kept.sum(dim=1, keepdim=True)).clamp(max=ordered.shape[1])
    cut_found = cut_found & (
        everything if ordered.shape[1] == num_entries else ~next_is_kept[:, -1]
    )
    threshold = ordered.gather(1, num - 1)
    # Of equal logits at the cut, the lower token ids are kept.
    tied = logits == threshold
    room = num - (ordered > threshold).sum(dim=1, keepdim=True)
    keep = (logits > threshold) | (tied & (tied.cumsum(dim=1) <= room))
    return Weighted(weights.masked_fill(~keep, 0.0), best, cut_found, ids)


def _weights(logits: Tensor, best: Tensor, temperature: float) -> Tensor:
    """float64[A, S]: exp((logits - best) / temperature)."""
    scaled = logits.double() - best.double()[:, None]
    if temperature != 1.0:
        scaled /= temperature
    return scaled.exp()


def top(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """``host.top`` on the device, for exactly ``k`` entries.

    ``topk`` alone does not specify which of several equal entries it returns, or in which order.
    """
    kth = scores.topk(k, dim=1).values.amin(dim=1, keepdim=True)
    above, tied = scores > kth, scores == kth
    room = k - above.sum(dim=1, keepdim=True)
    keep = above | (tied & (tied.cumsum(dim=1) <= room))
    places = torch.arange(scores.shape[1], 0, -1, device=scores.device)
    tokens = torch.where(keep, places, 0).topk(k, dim=1).indices  # in token-id order
    ordered, order = scores.gather(1, tokens).sort(dim=1, descending=True, stable=True)
    return tokens.gather(1, order), ordered


# ---------------------------------------------------------------------- sums and draws


def block_sums(weights: Tensor) -> Tensor:
    """Returns float64[A, B]: sums of ``BLOCK`` entries each, the last block padded with zeros."""
    parts = _blocks(weights)
    while parts.shape[-1] > 1:
        half = parts.shape[-1] // 2
        parts = parts[..., :half] + parts[..., half:]
    return parts[..., 0]


def _blocks(weights: Tensor) -> Tensor:
    missing = -weights.shape[1] % BLOCK
    padded = pad(weights, (0, missing)) if missing else weights
    return padded.unflatten(1, (-1, BLOCK))  # [A, B, BLOCK]; many times per draw: no einops


def running_sums(values: Tensor) -> Tensor:
    """Returns inclusive prefix sums [A, S] by doubling steps (Hillis and Steele 1986)."""
    step = 1
    while step < values.shape[1]:
        values = torch.cat([values[:, :step], values[:, step:] + values[:, :-step]], dim=1)
        step *= 2
    return values


def inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """``host.inverse_cdf`` on the device; 0 for rows without positive entries."""
    sums = block_sums(weights)
    cdf = running_sums(sums)
    draw = uniforms * cdf[:, -1]
    block = _first_above(cdf, sums, draw)[:, None]
    before = torch.where(block > 0, cdf.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = _blocks(weights).gather(1, block[..., None].expand(-1, -1, BLOCK))[:, 0]
    return block[:, 0] * BLOCK + _first_above(running_sums(inside), inside, draw - before[:, 0])


def _first_above(cdf: Tensor, weights: Tensor, draw: Tensor) -> Tensor:
    """int64[A]: the first positive entry whose CDF exceeds the draw, else the last positive entry.

    The rounded sums need not increase, so the draw may lie beyond the last.
    """
    positive = weights > 0.0
    places = torch.arange(weights.shape[1], device=weights.device)
    last = torch.where(positive, places, 0).amax(dim=1)
    return torch.minimum(_first(positive & (cdf > draw[:, None])), last)


def _first(hits: Tensor) -> Tensor:
    """int64[A]: the first true column of bool[A, S]; S if there is none."""
    places = torch.arange(hits.shape[1], device=hits.device)
    return torch.where(hits, places, hits.shape[1]).amin(dim=1)


def sample_candidates(
    probs: DeviceProbs, k: int, uniforms: FloatArray
) -> tuple[IntArray, FloatArray, IntArray]:
    """``host.sample_candidates`` on the device; copies a few numbers per row, once.

    Raises:
        ValueError: for rows with NaN, infinity or no allowed token.
    """
    rows = probs.rows
    draws = to_device(uniforms, rows.device)
    remaining, tokens, chances = rows, [], []
    for draw in range(k):
        drawn = inverse_cdf(remaining, draws[:, draw])[:, None]
        tokens.append(drawn[:, 0])
        chances.append(rows.gather(1, drawn)[:, 0])
        remaining = remaining.scatter(1, drawn, 0.0)
    possible = (rows > 0.0).sum(dim=1)
    numbers = [column.double() for column in [*tokens, *chances, possible, probs.best]]
    results = to_host(torch.stack(numbers, dim=1))
    check_finite(results[:, -1])
    counts = np.minimum(results[:, -2].astype(np.int64), k)
    valid = np.arange(k) < counts[:, None]
    with np.errstate(divide="ignore"):
        logprobs = np.log(np.where(valid, results[:, k : 2 * k], 0.0))
    return np.where(valid, results[:, :k], 0.0).astype(np.int64), logprobs, counts


def judge(
    target: Tensor, draft: Tensor, children: IntArray, tests: FloatArray, draws: FloatArray
) -> tuple[IntArray, IntArray]:
    """Multi-round rejection sampling at many nodes at once; see ``RejectionVerifier``.

    Args:
        target: float64[J, V], the target's distribution after each node.
        draft: float64[J, V], the distribution that the node's children were sampled from.
        children: int64[J, C], tokens in sampling order, -1 after the last.
        tests: float64[J, C], draws of the acceptance tests.
        draws: float64[J], draws of the correction tokens.

    Returns:
        (index of the accepted child, C for none; the correction token for that case), int64[J]
        each.
    """
    device = target.device
    vocab_size = max(target.shape[1], draft.shape[1])
    target, draft = (pad(rows, (0, vocab_size - rows.shape[1])) for rows in (target, draft))
    tokens, limits = (to_device(array, device) for array in (children, tests))
    width = children.shape[1]
    accepted = torch.full((len(children),), width, device=device)
    for place in range(width):
        is_child = tokens[:, place, None] >= 0
        token = tokens[:, place, None].clamp(min=0)
        if place:
            rest = draft.scatter(1, tokens[:, place - 1, None].clamp(min=0), 0.0)
            draft = rest / _total(rest)
        passes = limits[:, place, None] * draft.gather(1, token) < target.gather(1, token)
        passes = (passes & is_child)[:, 0]
        accepted = torch.where(passes & (accepted == width), place, accepted)
        residual = (target - draft).clamp(min=0.0)
        mass = _total(residual)
        target = torch.where(is_child & (mass > 0.0), residual / mass, target)
    corrections = inverse_cdf(target, to_device(draws, device))
    both = to_host(torch.stack([accepted, corrections]))
    return both[0], both[1]


def _total(rows: Tensor) -> Tensor:
    """[A, 1]: the sum of each row."""
    return running_sums(block_sums(rows))[:, -1:]
