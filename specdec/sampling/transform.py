"""The transform from logits to the distribution that is sampled; same for target and draft.

The order of steps is that of transformers' ``generate``: no_repeat_ngram, other processors,
temperature, top-k, top-p. The largest logits are selected on the device of the logits. Sampled
distributions are float64 in numpy on the host, from the temperature on. Every result depends only
on its own row: neither other rows of a batch nor padding changes a bit of it. A draft's candidates
are its most probable tokens, or samples by random numbers that depend only on seed, prompt and
position. Processors get each node's history: committed tokens, then the path to the node.

Shape letters: A rows (nodes that have logits), W rows (nodes that get candidates), V vocabulary, K
candidates, S stored entries of a row, T tokens of a history, B banned tokens.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Annotated, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.stride_tricks import sliding_window_view
from pydantic import AfterValidator, Field
from torch import Tensor

from specdec.device import Probs, SupportProbs, concatenate, on_host, to_host
from specdec.parts.fields import Limit, PositiveShare, expects, validated
from specdec.sampling.keyed_draws import KeyedDraws, Purpose
from specdec.types import Candidates, Commit, FloatArray, IntArray, NodeMap, TreeRows


class LogitsProcessor(Protocol):
    """A Hugging Face logits processor: a stateless function of history and scores."""

    def __call__(
        self, input_ids: torch.LongTensor, scores: torch.FloatTensor
    ) -> torch.FloatTensor: ...


def repeated_ngrams(history: IntArray, size: int) -> IntArray:
    """Returns the tokens, int64[B], that would complete an n-gram of this size that the history,
    int64[T], already contains, as ``NoRepeatNGramLogitsProcessor`` does; a token may occur twice.
    """
    if len(history) < size:
        return history[:0]
    ngrams = sliding_window_view(history, size)
    last = history[len(history) - size + 1 :]
    return ngrams[(ngrams[:, :-1] == last).all(axis=1), -1]


def apply_processors(
    processors: Sequence[LogitsProcessor], logits: Tensor, histories: Sequence[IntArray]
) -> Tensor:
    """Applies processors to logits [A, V], one call per row (a node) with the row's own history
    [1, T], as in plain decoding.
    """
    rows = []
    for row, history in zip(logits, histories, strict=True):
        input_ids = torch.from_numpy(history).to(logits.device)[None]
        scores = row[None].clone()  # a processor may write into its scores
        for processor in processors:
            scores = processor(input_ids, scores)  # type: ignore[arg-type]
        rows.append(scores)
    return torch.cat(rows) if rows else logits


class HistoryTracker:
    """Tracks the token sequence (history) up to each tree node that the target is processing.

    Histories are derived from the rows and commits that reach a rank (process of the run), so
    logits processors see the same tokens on every rank.
    """

    def __init__(self) -> None:
        self._committed: dict[int, IntArray] = {}  # request -> int64[T], the root last
        self._nodes: NodeMap[tuple[int, int]] = NodeMap()  # (token, parent id)

    def open(self, request_id: int, prompt: IntArray) -> None:
        self._committed[request_id] = np.array(prompt, np.int64)
        self._nodes.open(request_id)

    def observe(self, rows: TreeRows) -> list[IntArray] | None:
        """Records nodes that reached this rank, parents first, and returns their histories; None
        for a request that was not opened.
        """
        if rows.request not in self._nodes:
            return None
        links = zip(rows.tokens.tolist(), rows.parent_ids.tolist(), strict=True)
        self._nodes.update(rows.request, rows.node_ids, links)
        return [self._history(rows.request, node_id) for node_id in rows.node_ids.tolist()]

    def commit(self, commits: Sequence[Commit]) -> None:
        """Appends committed tokens to the histories; a second commit of a step changes nothing."""
        self._nodes.commit(commits)
        for commit in commits:
            if (tokens := self._committed.get(commit.request)) is not None:
                up_to_old_root = tokens[: commit.prefix_len - len(commit.retired_ids) + 1]
                self._committed[commit.request] = np.append(up_to_old_root, commit.new_tokens)

    def close(self, request_id: int) -> None:
        self._committed.pop(request_id, None)
        self._nodes.close(request_id)

    def _history(self, request_id: int, node_id: int) -> IntArray:
        """Returns int64[T]: the committed tokens and the path to the node."""
        nodes, path = self._nodes[request_id], list[int]()
        token, parent = nodes[node_id]
        while parent in nodes:  # the root's parent was retired
            path.append(token)
            token, parent = nodes[parent]
        return np.append(self._committed[request_id], np.array(path[::-1], np.int64))


def top_set(values: FloatArray, num: int) -> IntArray:
    """Returns the indices of the ``num`` largest values, sorted by index.

    Of equal values it takes those of the lowest indices, on every machine; ``argpartition`` does
    not.
    """
    if num >= len(values):
        return np.arange(len(values))
    if num <= 0:
        return np.zeros(0, np.int64)
    cut = np.partition(values, len(values) - num)[len(values) - num]
    chosen = (values >= cut).nonzero()[0]
    if len(chosen) > num:  # ties at the cut: the first of them
        left_out = (values.take(chosen) == cut).nonzero()[0][num - len(chosen) :]
        kept = np.ones(len(chosen), np.bool_)
        kept[left_out] = False
        chosen = chosen[kept]
    return chosen


SPARE = 64
"""Number of logits that a device selects beyond the k largest: they may tie with the k-th."""

_BLOCK = 64  # entries per block in the search for the largest entries of a row
_MIN_BLOCKS = 4  # per entry searched for; with fewer, a partition of the row is as fast
_CHUNK = 1 << 17  # entries of whole rows processed at a time: 1 MiB of float64, in the L2 cache

_TEMPERATURE = (
    "it must be 0 for greedy decoding, or a number such as 0.8 of at least 1e-6: a smaller one"
    " overflows 32-bit logits"
)
_COLDEST = 1e-6  # draws differ from greedy ones only where float32 logits are equal or adjacent


def _not_tiny(temperature: float) -> float:
    if 0 < temperature < _COLDEST:
        raise ValueError
    return temperature


@validated
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen from the target's logits.

    Attributes:
        temperature: 0 is greedy: the most probable token is chosen, or the one with the lowest
            token id if several are equal. top_k and top_p then have no effect.
        top_k: keep the k most probable tokens, and all that tie with the k-th; 0 disables it.
        top_p: keep the smallest set of most probable tokens with at least this mass; 1 disables it.
        no_repeat_ngram: ban tokens that would repeat an n-gram of this size in prompt and output; 0
            disables it.
        processors: Hugging Face logits processors, applied before the temperature.
    """

    temperature: Annotated[
        float, Field(ge=0, lt=1e6), AfterValidator(_not_tiny), expects(_TEMPERATURE)
    ] = 0.0
    top_k: Limit = 0
    top_p: PositiveShare = 1.0
    no_repeat_ngram: Limit = 0
    processors: tuple[LogitsProcessor, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.processors, tuple) or not all(map(callable, self.processors)):
            raise ValueError(
                f"processors={self.processors!r} is not allowed: give a tuple of Hugging Face"
                " logits processors, e.g. (RepetitionPenaltyLogitsProcessor(1.1),)"
            )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def needs_history(self) -> bool:
        """Whether the transform needs the tokens before the sampled one."""
        return bool(self.no_repeat_ngram or self.processors)


_UNFILTERED = SamplingParams(temperature=1.0)


class SamplingTransform:
    """Applies ``SamplingParams`` to logits.

    In every method, logits are [A, V] tensors of any float type and device, and ``histories[i]`` is
    the int64 tokens up to and including the node of row i, or None if ``params.needs_history`` is
    false. Rows with NaN, infinity or no allowed token raise a ``ValueError``.
    """

    def __init__(self, params: SamplingParams) -> None:
        self.params = params

    def sample(
        self, logits: Tensor, uniforms: FloatArray, histories: Sequence[IntArray] | None = None
    ) -> IntArray:
        """Returns a token per row, int64[A]: the argmax if greedy, else the token where the CDF, in
        token-id order, exceeds the row's random number in ``uniforms``[A].
        """
        if self.params.greedy:
            return self.greedy(logits, histories)
        tokens, start = [np.zeros(0, np.int64)], 0
        for weights in _filtered(self._processed(logits, histories), self.params):
            tokens.append(draw(weights, uniforms[start : start + len(weights)]))
            start += len(weights)
        return np.concatenate(tokens)

    def greedy(self, logits: Tensor, histories: Sequence[IntArray] | None = None) -> IntArray:
        """Returns int64[A]: each row's token of the largest processed logit, the first if tied."""
        logits = self._processed(logits, histories)
        if not on_accelerator(logits):
            return argmax(logits.numpy())
        best = logits.max(dim=1)  # returns the first of equal entries
        tokens, values = _copied(best.indices, best.values)
        check_finite(values.tolist())
        return tokens

    def distribution(
        self, logits: Tensor, histories: Sequence[IntArray] | None = None
    ) -> FloatArray | SupportProbs:
        """Returns the sampled distribution [A, V], one-hot if greedy; stored as ``SupportProbs`` if
        it is one-hot or top-k or top-p filter it.
        """
        if not self.params.greedy:
            return self._joined(self._processed(logits, histories), self.params)
        best = self.greedy(logits, histories)[:, None]
        return SupportProbs(best, np.ones(best.shape), logits.shape[1])

    def probs(self, logits: Tensor, histories: Sequence[IntArray] | None = None) -> FloatArray:
        """Returns ``distribution`` as a dense array, float64[A, V]."""
        return np.asarray(self.distribution(logits, histories))

    def proposal_probs(
        self, logits: Tensor, histories: Sequence[IntArray] | None = None
    ) -> FloatArray | SupportProbs:
        """Returns the distribution [W, V] from which a draft samples candidates: ``distribution``,
        or, if that is greedy, the softmax at temperature 1, since a one-hot distribution cannot
        propose siblings. Rejection sampling is lossless with either.
        """
        if not self.params.greedy:
            return self.distribution(logits, histories)
        return self._joined(self._processed(logits, histories), _UNFILTERED)

    def top(
        self, logits: Tensor, k: int, histories: Sequence[IntArray] | None = None
    ) -> tuple[IntArray, FloatArray]:
        """Returns tokens int64[W, K] and log probabilities float64[W, K], K = min(k, V), best
        first, ties in token-id order.

        Processors (-inf for what they ban) and temperature (1 if greedy) are applied, top-k and
        top-p are not: the log probabilities estimate how likely the target samples each token.
        """
        k = min(k, logits.shape[1])
        if not len(logits):
            return np.zeros((0, k), np.int64), np.zeros((0, k))
        scores = _log_softmax(self._processed(logits, histories), self.params.temperature or 1.0)
        ids, values = _largest(scores, k)
        order = (-values).argsort(axis=1, kind="stable")[:, :k]
        logprobs = np.take_along_axis(values, order, axis=1)
        check_finite(logprobs[:, 0].tolist())
        return np.take_along_axis(ids, order, axis=1), np.minimum(logprobs, 0.0, dtype=np.float64)

    def _joined(self, logits: Tensor, params: SamplingParams) -> FloatArray | SupportProbs:
        parts = [_normalised(weights) for weights in _filtered(logits, params)]
        return concatenate(parts) if parts else np.zeros(logits.shape)

    def _processed(self, logits: Tensor, histories: Sequence[IntArray] | None) -> Tensor:
        """Returns processed logits [A, V] in float32 or float64; the input is unchanged."""
        logits = logits.detach()
        if not on_accelerator(logits):
            logits = logits.cpu()
        if logits.dtype not in (torch.float32, torch.float64):
            logits = logits.float()
        params = self.params
        if not params.needs_history:
            return logits
        assert histories is not None, "these sampling parameters need histories"
        if params.no_repeat_ngram:
            logits = logits.clone()
            for row, history in zip(logits, histories, strict=True):
                banned = repeated_ngrams(history, params.no_repeat_ngram)
                row[torch.from_numpy(banned[banned < len(row)])] = -torch.inf
        if params.processors:
            logits = apply_processors(params.processors, logits, histories)
        return logits


# Filters.


def _filtered(logits: Tensor, params: SamplingParams) -> Iterator[FloatArray | SupportProbs]:
    """Applies temperature, top-k and top-p to logits [A, V]; yields unnormalised probabilities."""
    temperature, top_p, (num_rows, vocab_size) = params.temperature, params.top_p, logits.shape
    if not num_rows:
        return
    if 0 < params.top_k < vocab_size:
        ids, values = _largest(logits, params.top_k)
        kth = np.partition(values, -params.top_k, axis=1)[:, -params.top_k, None]
        weights = _weights(values, temperature)
        weights[values < kth] = 0.0  # all entries that tie with the k-th are kept
        if top_p < 1.0:
            _cut_tail(weights, top_p * weights.cumsum(axis=1)[:, -1:])
        yield SupportProbs(ids, weights, vocab_size)
        return
    for rows in logits.split(max(1, _CHUNK // vocab_size)):
        values = to_host(rows)
        if top_p == 1.0:
            yield _weights(values, temperature)
            continue
        near = _weights(values, temperature, values.dtype)
        # Entries below share / vocab_size have in total at most half of the mass to cut, the others
        # below the second bound 0.45 of it. So none is kept, and for their sum the precision of the
        # logits is enough.
        share = 0.5 * (1.0 - top_p) * near.sum(axis=1)
        num = [np.count_nonzero(row) for row in near >= share[:, None] / vocab_size]
        least = np.divide(0.9 * share, num, dtype=values.dtype)
        ids, chosen = _by_row(near >= least[:, None], near)
        weights = _weights(np.take_along_axis(values, ids, axis=1), temperature)
        weights[chosen < 0.0] = 0.0  # padding
        np.put_along_axis(near, np.where(chosen < 0.0, ids[:, :1], ids), 0.0, axis=1)
        total = weights.cumsum(axis=1)[:, -1:] + near.sum(axis=1, keepdims=True)
        _cut_tail(weights, top_p * total)
        yield SupportProbs(ids, weights, vocab_size)


def _weights(
    values: npt.NDArray[np.floating], temperature: float, dtype: npt.DTypeLike = np.float64
) -> npt.NDArray[Any]:
    best = values.max(axis=1, keepdims=True)
    check_finite(best[:, 0].tolist())
    weights = np.subtract(values, best, dtype=dtype)
    with np.errstate(over="ignore"):  # float32 may overflow to -inf
        weights /= temperature
    return np.exp(weights, out=weights)


def _cut_tail(weights: FloatArray, enough: FloatArray) -> None:
    """Sets the entries of ``weights``[A, S] to 0 that top-p removes, in place.

    As in transformers, the best entry is kept, and further ones in descending order while the mass
    before them is below ``enough``[A, 1]. Of equal weights at the cut, lower token ids are kept.
    """
    ordered = np.sort(weights, axis=1)[:, ::-1]
    mass_before = ordered.cumsum(axis=1)[:, :-1]
    num_kept = 1 + np.count_nonzero(mass_before < enough, axis=1, keepdims=True)
    least = np.take_along_axis(ordered, num_kept - 1, axis=1)
    keep = weights >= least
    weights *= keep
    too_many = np.count_nonzero(keep, axis=1) - num_kept[:, 0]
    for row in np.flatnonzero(too_many > 0):
        tied = np.flatnonzero(weights[row] == least[row])
        weights[row, tied[-too_many[row] :]] = 0.0


def _normalised(weights: FloatArray | SupportProbs) -> FloatArray | SupportProbs:
    if not isinstance(weights, SupportProbs):
        return weights / weights.sum(axis=1, keepdims=True)
    total = weights.values.cumsum(axis=1)[:, -1:]  # unlike ``sum``, independent of the padding
    return SupportProbs(weights.ids, weights.values / total, weights.vocab_size)


def check_finite(best: Iterable[float]) -> None:
    """Raises ``ValueError`` if a row maximum in ``best`` is not finite; sampling would hide it."""
    wrong = [value for value in best if not isfinite(value)]
    if not wrong:
        return
    raise ValueError(
        f"the largest logit of a row is {wrong[0]}: the model returned NaN or"
        " infinity, or the logits processors banned every token; check the model's precision"
        " (dtype) and the processors"
    )


# The largest entries.


def on_accelerator(tensor: Tensor) -> bool:
    """Returns whether the largest logits are selected on the tensor's device; otherwise (cpu, mps)
    all logits are copied to the host first.
    """
    return tensor.device.type not in ("cpu", "mps")


def argmax(values: npt.NDArray[np.floating]) -> IntArray:
    """Returns int64[A]: the first of the largest entries of each row of values[A, V]."""
    best: IntArray = values.argmax(axis=1)  # NaN counts as the largest
    check_finite([values[row, token] for row, token in enumerate(best.tolist())])
    return best


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    if on_accelerator(logits):
        return torch.log_softmax(logits / temperature, dim=1)
    # In numpy: torch's threads, woken up for this, took as long as a pass of a draft head
    # (experiments/log/2026-12-01-short-spins.md).
    with np.errstate(invalid="ignore"):  # ``_largest`` refuses rows with NaN or infinity
        scores = logits.numpy() / temperature
        scores -= scores.max(axis=1, keepdims=True)
        scores -= np.log(np.exp(scores).sum(axis=1, keepdims=True))
    return torch.from_numpy(scores)


def _largest(values: Tensor, k: int) -> tuple[IntArray, npt.NDArray[np.floating]]:
    """Selects all entries of each row that are at least its k-th largest, and maybe others.

    Returns (token ids int64[A, S], increasing along a row; values [A, S]) with S >= k, padded with
    id 0 and -inf at the end (anywhere if selected on a device). Only finite entries are selected; A
    > 0 and k <= V.
    """
    vocab_size = values.shape[1]
    if on_accelerator(values):
        found = values.topk(min(k + SPARE, vocab_size), dim=1)
        ids, chosen = _copied(found.indices, found.values)
        check_finite(chosen[:, 0].tolist())  # NaN counts as the largest
        if len(ids[0]) == vocab_size or (chosen[:, -1] < chosen[:, k - 1]).all():
            order = ids.argsort(axis=1)
            return np.take_along_axis(ids, order, 1), np.take_along_axis(chosen, order, 1)
        values = values.cpu()  # more entries may tie with the k-th
    rows, num_blocks = values.numpy(), vocab_size // _BLOCK
    check_finite(rows.max(axis=1).tolist())
    searched = rows
    if num_blocks >= _MIN_BLOCKS * k:
        # Each of k blocks contains an entry at least as large as the k-th largest of the maxima. A
        # block has every num_blocks-th entry.
        searched = rows[:, : num_blocks * _BLOCK].reshape(-1, _BLOCK, num_blocks).max(axis=1)
    bound = np.partition(searched, -k, axis=1)[:, -k, None]
    return _by_row(rows >= np.maximum(bound, np.finfo(rows.dtype).min), rows, k)


def _by_row(
    chosen: npt.NDArray[np.bool_], values: npt.NDArray[np.floating], min_width: int = 1
) -> tuple[IntArray, npt.NDArray[np.floating]]:
    num_rows, vocab_size = chosen.shape
    flat = np.flatnonzero(chosen)
    if num_rows == 1 and len(flat) >= min_width:  # no indices of a padded copy
        return flat[None], values.reshape(-1).take(flat)[None]
    starts = np.searchsorted(flat, np.arange(num_rows) * vocab_size)
    counts = np.diff(starts, append=len(flat))
    rows = np.repeat(np.arange(num_rows), counts)
    columns = np.arange(len(flat)) - starts[rows]
    shape = num_rows, max(min_width, int(counts.max()))
    ids, padded = np.zeros(shape, np.int64), np.full(shape, -np.inf, values.dtype)
    ids[rows, columns] = flat - rows * vocab_size
    padded[rows, columns] = values.reshape(-1)[flat]
    return ids, padded


def _copied(indices: Tensor, values: Tensor) -> tuple[IntArray, FloatArray]:
    """Copies both tensors to the host in one transfer, since each transfer waits for the device."""
    both = to_host(torch.stack([indices.double(), values.double()]))
    return both[0].astype(np.int64), both[1]


# Draws.


def draw(weights: FloatArray | SupportProbs, uniforms: FloatArray) -> IntArray:
    """Samples a token per row, int64[A], by inverse CDF in token-id order at ``uniforms``[A]."""
    if not isinstance(weights, SupportProbs):
        return inverse_cdf(weights, uniforms)
    return weights.ids[np.arange(len(weights)), inverse_cdf(weights.values, uniforms)]


def inverse_cdf(weights: FloatArray, uniforms: FloatArray) -> IntArray:
    """Inverts the CDF of each row of ``weights``, float64[A, S]: returns int64[A], the first index
    whose cumulative share exceeds the row's number in ``uniforms``, never one of weight 0.
    """
    cdf = weights.cumsum(axis=1)
    # The draw stays below the last entry: u <= 1 - 2**-53 rounds down.
    first: IntArray = (cdf > uniforms[:, None] * cdf[:, -1:]).argmax(axis=1)
    return first


def sample_candidates(
    probs: FloatArray, k: int, uniforms: FloatArray
) -> tuple[IntArray, FloatArray, IntArray]:
    """Samples up to ``k`` entries per row of ``probs``, float64[W, S], without replacement: each by
    inverse CDF at ``uniforms``, float64[W, k], of what the earlier ones leave, renormalised.

    Returns indices int64[W, k] in sampling order; log probabilities float64[W, k] in the original
    row, -inf where no entry was left; counts int64[W], the number of sampled entries.
    """
    num_rows = len(probs)
    entries = np.zeros((num_rows, k), np.int64)
    chances = np.zeros((num_rows, k))
    counts = np.minimum(np.count_nonzero(probs, axis=1), k)
    remaining = probs.copy()
    for number in range(int(counts.max(initial=0))):
        live = np.flatnonzero(counts > number)
        drawn = inverse_cdf(remaining[live], uniforms[live, number])
        entries[live, number] = drawn
        chances[live, number] = probs[live, drawn]
        remaining[live, drawn] = 0.0
    with np.errstate(divide="ignore"):
        return entries, np.log(chances), counts


def drawn(probs: Probs, k: int, uniforms: FloatArray) -> Candidates:
    """Samples ``k`` candidates per row of ``probs`` [W, V] by ``uniforms``, float64[W, k]."""
    if not isinstance(probs, SupportProbs):
        tokens, logprobs, counts = sample_candidates(on_host(probs), k, uniforms)
    else:
        entries, logprobs, counts = sample_candidates(probs.values, k, uniforms)
        tokens = np.take_along_axis(probs.ids, entries, axis=1)
    return Candidates(tokens=tokens, logprobs=logprobs, counts=counts, probs=probs)


def sibling_draws(draws: KeyedDraws, request_id: int, positions: IntArray, k: int) -> FloatArray:
    """Returns float64[W, K]: random numbers for K children of each node at ``positions``[W]."""
    return draws.uniform(request_id, positions[:, None] + 1, Purpose.DRAFT, np.arange(k))


def top_candidates(
    transform: SamplingTransform, logits: Tensor, k: int, histories: Sequence[IntArray] | None
) -> Candidates:
    tokens, logprobs = transform.top(logits, k, histories)
    return Candidates(tokens=tokens, logprobs=logprobs, counts=counts_of(transform, logprobs))


def counts_of(transform: SamplingTransform, logprobs: FloatArray) -> IntArray:
    if transform.params.needs_history:
        return np.asarray((logprobs > -np.inf).sum(axis=1), np.int64)
    return np.full(len(logprobs), logprobs.shape[1])


def candidates_of(
    transform: SamplingTransform,
    logits: Tensor,
    k: int,
    histories: Sequence[IntArray] | None,
    *,
    draws: KeyedDraws | None,
    request_id: int,
    positions: IntArray,
) -> Candidates:
    """Returns up to ``k`` candidates for each of W nodes of one request at ``positions``, int64[W].

    If ``draws`` is None, the candidates are the most probable tokens. Else they are sampled with
    these random numbers, and the result also has the distributions in ``probs``.
    """
    if draws is None:
        return top_candidates(transform, logits, k, histories)
    probs, k = transform.proposal_probs(logits, histories), min(k, logits.shape[1])
    return drawn(probs, k, sibling_draws(draws, request_id, positions, k))
