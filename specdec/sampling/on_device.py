"""The sampling transform in torch, for logits that lie on an accelerator.

The same distributions and the same draws as ``filters`` and ``distribution``, which work on arrays
because a handful of numpy calls costs less than one launch; here whole rows stay where they are,
the uniforms go there, and tokens come back. Sums are trees of elementwise additions: libraries
choose the order of a reduction by the shape of the whole call, and then a row's last bits would
depend on the rows beside it. Comparisons and integers do the rest, so that the host's result is
reached but for draws within a rounding error of an edge.

Nothing here waits for the device except ``to_host``, once per call.

Shape letters: A rows, V vocabulary, S entries, B blocks, K candidates, J judged nodes, C children.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import pad

from specdec.device import DeviceProbs, to_device, to_host
from specdec.sampling.host import check_finite
from specdec.types import FloatArray, IntArray

BLOCK = 64
"""Entries that are summed as one before a running sum over them; a power of two."""

NUCLEUS = 1024
"""Most probable entries in which the cut of top-p is looked for before a row is sorted whole."""

_ENTRIES = 1 << 24  # of logits at a time: 128 MiB per float64 intermediate
_FAULTY = -1

NOT_FOUND = -2
"""Instead of a token, where top-p's cut was not among the entries that were looked at."""


def on_accelerator(tensor: torch.Tensor) -> bool:
    """Whether this module's functions, and not numpy's, are to work on it (mps has no float64)."""
    return tensor.device.type not in ("cpu", "mps")


def argmax(logits: torch.Tensor) -> IntArray:
    """int64[A]: the first of the largest entries of each row of [A, V]."""
    best = logits.max(dim=1)  # whose indices are the first
    tokens = torch.where(best.values.isfinite(), best.indices, _FAULTY)
    return checked(to_host(tokens), logits)


def sample(
    logits: torch.Tensor, uniforms: FloatArray, *, temperature: float, top_k: int, top_p: float
) -> IntArray:
    """int64[A]: the token at ``uniforms``[A] of each processed row's CDF, in token order.

    Args:
        logits: [A, V], float32 or float64.
        uniforms: float64[A] in [0, 1).
        temperature: above 0.
        top_k: 0, or V and more, is off.
        top_p: 1 is off.

    Raises:
        ValueError: for rows with NaN, infinity or no allowed token.
    """
    vocab_size = logits.shape[1]
    step = max(1, _ENTRIES // vocab_size)
    draws = to_device(uniforms, logits.device)
    for width in (min(NUCLEUS, vocab_size), vocab_size):
        parts = []
        for rows, some in zip(logits.split(step), draws.split(step), strict=True):
            weighted = weigh(rows, temperature=temperature, top_k=top_k, top_p=top_p, width=width)
            parts.append(weighted.draw(some))
        found = to_host(torch.cat(parts))
        if not (found == NOT_FOUND).any():
            break
    return checked(found, logits)


def checked(tokens: IntArray, logits: torch.Tensor) -> IntArray:
    """``tokens``, unless one of them says that its row of logits[A, V] is at fault.

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
        weights: float64[A, V], at most 1, 0 for what the filters drop.
        best: [A], the largest logit.
        found: bool[A], whether top-p's cut was found; the weights hold only then.
    """

    weights: torch.Tensor
    best: torch.Tensor
    found: torch.Tensor

    def draw(self, uniforms: torch.Tensor) -> torch.Tensor:
        """int64[A] on the device: a token of each row, or below 0 for the fault that it has."""
        tokens = torch.where(self.found, inverse_cdf(self.weights, uniforms), NOT_FOUND)
        return torch.where(self.best.isfinite(), tokens, _FAULTY)

    def sample(self, uniforms: FloatArray) -> IntArray:
        """As ``Distribution.sample``; for rows whose cut was found."""
        draws = to_device(uniforms, self.weights.device)
        return checked(to_host(self.draw(draws)), self.best[:, None])

    def probs(self) -> DeviceProbs:
        """Normalised."""
        return DeviceProbs(self.weights / _total(self.weights), self.best)


def one_hot(logits: torch.Tensor) -> Weighted:
    """All weight on the first of the largest entries of each row."""
    best = logits.max(dim=1)
    weights = torch.zeros(logits.shape, dtype=torch.float64, device=logits.device)
    weights = weights.scatter(1, best.indices[:, None], 1.0)
    return Weighted(weights, best.values, torch.ones_like(best.indices, dtype=torch.bool))


def weigh(
    logits: torch.Tensor,
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    width: int | None = None,
) -> Weighted:
    """Temperature, top-k (with all that tie with the k-th), then top-p.

    Args:
        logits: [A, V], float32 or float64.
        temperature, top_k, top_p: as in ``sample``.
        width: top-p's cut is looked for among so many of the most probable entries; all where None.
    """
    vocab_size = logits.shape[1]
    best = logits.amax(dim=1)
    everything = torch.ones_like(best, dtype=torch.bool)
    if 0 < top_k < vocab_size:
        kth = logits.topk(top_k, dim=1).values.amin(dim=1, keepdim=True)
        logits = logits.masked_fill(logits < kth, -torch.inf)
    weights = _weights(logits, best, temperature)
    if top_p == 1.0:
        return Weighted(weights, best, everything)
    ordered = logits.topk(vocab_size if width is None else width, dim=1).values
    total = _total(weights)
    # Of the descending order an entry stays while what comes from it on exceeds what may be cut.
    rest = total - running_sums(_weights(ordered, best, temperature))
    stays = rest > (1.0 - top_p) * total
    num = (1 + stays.sum(dim=1, keepdim=True)).clamp(max=ordered.shape[1])
    found = everything if ordered.shape[1] == vocab_size else ~stays[:, -1]
    threshold = ordered.gather(1, num - 1)
    # Of equal logits on both sides of the cut the lower token ids stay.
    tied = logits == threshold
    room = num - (ordered > threshold).sum(dim=1, keepdim=True)
    keep = (logits > threshold) | (tied & (tied.cumsum(dim=1) <= room))
    return Weighted(weights.masked_fill(~keep, 0.0), best, found)


def _weights(logits: torch.Tensor, best: torch.Tensor, temperature: float) -> torch.Tensor:
    """float64[A, S]: exp((logits - best) / temperature)."""
    scaled = logits.double() - best.double()[:, None]
    if temperature != 1.0:
        scaled /= temperature
    return scaled.exp()


def top(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens int64[W, k], scores[W, k]): the ``k`` best, ties in token-id order.

    ``topk`` alone leaves open which of several equal entries it takes, and in which order.
    """
    kth = scores.topk(k, dim=1).values.amin(dim=1, keepdim=True)
    above, tied = scores > kth, scores == kth
    room = k - above.sum(dim=1, keepdim=True)
    keep = above | (tied & (tied.cumsum(dim=1) <= room))
    places = torch.arange(scores.shape[1], 0, -1, device=scores.device)
    tokens = torch.where(keep, places, 0).topk(k, dim=1).indices  # in token-id order
    ordered, at = scores.gather(1, tokens).sort(dim=1, descending=True, stable=True)
    return tokens.gather(1, at), ordered


# ---------------------------------------------------------------------- sums and draws


def block_sums(weights: torch.Tensor) -> torch.Tensor:
    """float64[A, B]: sums of ``BLOCK`` entries each, the last block padded with zeros."""
    parts = _blocks(weights)
    while parts.shape[-1] > 1:
        half = parts.shape[-1] // 2
        parts = parts[..., :half] + parts[..., half:]
    return parts[..., 0]


def _blocks(weights: torch.Tensor) -> torch.Tensor:
    missing = -weights.shape[1] % BLOCK
    padded = pad(weights, (0, missing)) if missing else weights
    return padded.unflatten(1, (-1, BLOCK))


def running_sums(values: torch.Tensor) -> torch.Tensor:
    """[A, S]: inclusive, by doubling steps (Hillis and Steele 1986); entry i needs the first i."""
    step = 1
    while step < values.shape[1]:
        values = torch.cat([values[:, :step], values[:, step:] + values[:, :-step]], dim=1)
        step *= 2
    return values


def inverse_cdf(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The first entry of each row whose cumulative share exceeds the row's uniform.

    Entries of weight 0 are never returned, but 0 for rows without any other.

    Args:
        weights: float64[A, S], >= 0.
        uniforms: float64[A] in [0, 1).

    Returns:
        int64[A].
    """
    sums = block_sums(weights)
    cdf = running_sums(sums)
    draw = uniforms * cdf[:, -1]
    block = _first_above(cdf, sums, draw)[:, None]
    before = torch.where(block > 0, cdf.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = _blocks(weights).gather(1, block[..., None].expand(-1, -1, BLOCK))[:, 0]
    return block[:, 0] * BLOCK + _first_above(running_sums(inside), inside, draw - before[:, 0])


def _first_above(cdf: torch.Tensor, weights: torch.Tensor, draw: torch.Tensor) -> torch.Tensor:
    """int64[A]: the first entry with weight whose cdf exceeds the draw, or else the last with any.

    Sums of several roundings need not increase, so the draw may lie beyond the last.
    """
    positive = weights > 0.0
    places = torch.arange(weights.shape[1], device=weights.device)
    last = torch.where(positive, places, 0).amax(dim=1)
    return torch.minimum(_first(positive & (cdf > draw[:, None])), last)


def _first(hits: torch.Tensor) -> torch.Tensor:
    """int64[A]: the first column of bool[A, S] that is set; S where none is."""
    places = torch.arange(hits.shape[1], device=hits.device)
    return torch.where(hits, places, hits.shape[1]).amin(dim=1)


def sample_candidates(
    probs: DeviceProbs, k: int, uniforms: FloatArray
) -> tuple[IntArray, FloatArray, IntArray]:
    """``distribution.sample_candidates`` for rows on a device; one copy of a few numbers per row.

    Raises:
        ValueError: for rows with NaN, infinity or no allowed token.
    """
    rows = probs.rows
    draws = to_device(uniforms, rows.device)
    left, tokens, chances = rows, [], []
    for draw in range(k):
        drawn = inverse_cdf(left, draws[:, draw])[:, None]
        tokens.append(drawn[:, 0])
        chances.append(rows.gather(1, drawn)[:, 0])
        left = left.scatter(1, drawn, 0.0)
    possible = (rows > 0.0).sum(dim=1)
    numbers = [column.double() for column in [*tokens, *chances, possible, probs.best]]
    found = to_host(torch.stack(numbers, dim=1))
    check_finite(found[:, -1])
    counts = np.minimum(found[:, -2].astype(np.int64), k)
    valid = np.arange(k) < counts[:, None]
    with np.errstate(divide="ignore"):
        logprobs = np.log(np.where(valid, found[:, k : 2 * k], 0.0))
    return np.where(valid, found[:, :k], 0.0).astype(np.int64), logprobs, counts


def judge(
    target: torch.Tensor,
    draft: torch.Tensor,
    children: IntArray,
    tests: FloatArray,
    draws: FloatArray,
) -> tuple[IntArray, IntArray]:
    """Multi-round rejection sampling at many nodes at once; see ``RejectionVerifier``.

    Args:
        target: float64[J, V], the target's distribution after each node.
        draft: float64[J, V], the one that its children were sampled from.
        children: int64[J, C], tokens in sampling order, -1 after the last.
        tests: float64[J, C], draws of the acceptance tests.
        draws: float64[J], draws of the correction tokens.

    Returns:
        (which child is accepted, C for none; the correction token in that case), int64[J] each.
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
            left = draft.scatter(1, tokens[:, place - 1, None].clamp(min=0), 0.0)
            draft = left / _total(left)
        passes = limits[:, place, None] * draft.gather(1, token) < target.gather(1, token)
        passes = (passes & is_child)[:, 0]
        accepted = torch.where(passes & (accepted == width), place, accepted)
        rest = (target - draft).clamp(min=0.0)
        mass = _total(rest)
        target = torch.where(is_child & (mass > 0.0), rest / mass, target)
    corrections = inverse_cdf(target, to_device(draws, device))
    both = to_host(torch.stack([accepted, corrections]))
    return both[0], both[1]


def _total(rows: torch.Tensor) -> torch.Tensor:
    return running_sums(block_sums(rows))[:, -1:]
