"""Fits acceptance models by maximum likelihood: SLSQP over log odds, gradients by autograd.

Shape letters: S segments of requests, T positions, C classes, D depths. Segments are the last axis
because there are many of them, and only one to three classes.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import minimize
from scipy.special import expit, logit
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specdec.fitting.model import AcceptanceModel
from specdec.fitting.requests import RequestLog
from specdec.types import FloatArray

_UNKNOWN = -1  # marks a position whose draft token was never verified
_LONGEST = 160  # positions of a segment; short ones fit faster, but each starts from the shares
_FEW = (0, 1, 2, 2, 3)  # depths 0, 1, 2 to 3, and 4 or more have separate parameters
_RESCALE = 16  # positions after which forward probabilities are normalised


class Observations(NamedTuple):
    hits: Tensor  # int64[T, S], 1, 0 or _UNKNOWN, which also fills the end of a segment
    depths: Tensor  # int64[T, S], depth of the draft token below its root, from 0
    weights: Tensor  # float64[S], how often the segment occurred

    @property
    def num_known(self) -> float:
        return float(((self.hits != _UNKNOWN) * self.weights).sum())


class ModelSize(NamedTuple):
    classes: int = 1
    bins: tuple[int, ...] = (0,)


def observe(requests: Sequence[RequestLog]) -> Observations:
    """Turns passes into sequences of hits and misses of draft tokens, with their depths.

    A pass that accepted a of k draft tokens has hits at depths 0 to a - 1, and a miss at depth a if
    a < k. Depths from k on count as unknown.
    """
    hits: list[Tensor] = []
    depths: list[Tensor] = []
    weights: list[float] = []
    for log in requests:
        lengths = log.accepted + 1
        depth = np.concatenate([np.arange(length) for length in lengths])
        accepted, drafted = np.repeat([log.accepted, log.drafted], lengths, axis=1)
        hit = np.where(depth < drafted, depth < accepted, _UNKNOWN)
        sizes = _LONGEST if log.ordered else lengths.tolist()
        hits += torch.from_numpy(hit).split(sizes)
        depths += torch.from_numpy(depth).split(sizes)
        weights += [1.0] * (len(hits) - len(weights)) if log.ordered else log.counts.tolist()
    return Observations(
        pad_sequence(hits, padding_value=_UNKNOWN),
        pad_sequence(depths),
        torch.tensor(weights, dtype=torch.float64),
    )


def log_likelihood(
    data: Observations, odds: Tensor, depth: Tensor, stay: Tensor, weights: Tensor
) -> Tensor:
    """Returns the log-likelihood of all segments by the forward algorithm (Rabiner 1989, Eqs. 19 to
    21) for parameters of ``AcceptanceModel``. ``odds`` (log odds of ``top1``), ``stay`` and
    ``weights`` are [C]; the last entry of ``depth``, [D], applies to all larger depths.
    """
    added = depth[data.depths.clamp(max=len(depth) - 1)]
    signed = (odds[:, None] + added[:, None]) * (2 * data.hits - 1)[:, None]
    rates = torch.where(data.hits[:, None] == _UNKNOWN, 1.0, signed.sigmoid())  # [T, C, S]
    step = torch.diag(stay) + torch.outer(1.0 - stay, weights)  # [from, to]
    start = weights / (1.0 - stay)
    alive, logs = (start / start.sum())[:, None], torch.zeros(())  # [C, S], [S]
    for at, rate in enumerate(rates.unbind(), start=1):
        alive = alive * rate
        if at % _RESCALE == 0 or at == len(rates):
            total = alive.sum(0)
            logs, alive = logs + total.log(), alive / total
        alive = step.T @ alive
    return logs @ data.weights


def measured(requests: Sequence[RequestLog]) -> tuple[float, float]:
    """Returns the mean tokens per target pass and its standard error, NaN for a single request."""
    tokens = np.array([request.counts @ (request.accepted + 1) for request in requests])
    passes = np.array([request.counts.sum() for request in requests])
    mean, count = tokens.sum() / passes.sum(), len(tokens)
    variance = ((tokens - mean * passes) ** 2).sum() * count / (count - 1 or math.nan)
    return float(mean), float(math.sqrt(variance) / passes.sum())


def predicted(model: AcceptanceModel, requests: Sequence[RequestLog]) -> float:
    if any(request.adaptive for request in requests):
        return model.adaptive_tokens_per_pass()
    numbers, passes = draft_tokens(requests)
    return float(np.average([model.tokens_per_pass(int(k)) for k in numbers], weights=passes))


def draft_tokens(requests: Sequence[RequestLog]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the distinct numbers of draft tokens per pass, and how many passes have each."""
    drafted = np.concatenate([request.drafted for request in requests])
    numbers, at = np.unique(drafted, return_inverse=True)
    return numbers, np.bincount(at, np.concatenate([request.counts for request in requests]))


def fit_model(requests: Sequence[RequestLog], size: ModelSize) -> tuple[AcceptanceModel, float]:
    """Returns the likeliest model whose tokens per pass equal the measured ones, and Akaike's
    criterion.

    Without this constraint, the predicted value is wrong where acceptance varies much between
    requests. The fit starts from easy classes that last longer, as misses cluster in real text.
    """
    classes, bins, data = size.classes, torch.tensor(size.bins), observe(requests)
    known = max(data.num_known, 1.0)
    hit_rate = float((data.hits == 1).double().sum(0) @ data.weights) / known
    several, mean = classes > 1, measured(requests)[0]
    parts = (  # start and limit of each array of log odds
        (logit(np.clip(hit_rate, 0.02, 0.98)) + np.linspace(-1.5, 1.5, classes) * several, 9.2),
        (np.zeros(size.bins[-1]), 6.0),
        (np.linspace(0.8, 2.9, classes * several), 5.3),
        (np.zeros(classes - 1), 9.2),
    )
    zero = torch.zeros(1, dtype=torch.float64)

    def parameters(values: FloatArray | Tensor) -> list[Tensor]:
        lengths = [len(start) for start, _ in parts]
        odds, depth, stay, weights = torch.as_tensor(values).split(lengths)
        stay, weights = stay.sigmoid() if several else zero, torch.cat([zero, weights]).softmax(0)
        return [odds, torch.cat([zero, depth])[bins], stay, weights]

    def model(values: FloatArray) -> AcceptanceModel:
        odds, depth, stay, weights = (part.numpy() for part in parameters(values))
        return AcceptanceModel(top1=expit(odds), depth=depth, stay=stay, weights=weights)

    def cost(values: FloatArray) -> tuple[float, FloatArray]:
        variable = torch.tensor(values, requires_grad=True)
        loss = -log_likelihood(data, *parameters(variable)) / known
        (gradient,) = torch.autograd.grad(loss, variable)
        return loss.item(), gradient.numpy()

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the arrays are small: waiting threads cost more than they save
    try:
        found = minimize(
            cost,
            np.concatenate([start for start, _ in parts]),
            jac=True,
            method="SLSQP",
            bounds=[(-limit, limit) for start, limit in parts for _ in start],
            constraints={"type": "eq", "fun": lambda x: predicted(model(x), requests) / mean - 1.0},
            options={"ftol": 1e-9, "maxiter": 300},
        )
    finally:
        torch.set_num_threads(threads)
    return model(found.x), 2.0 * (len(found.x) + found.fun * known)


def choose_size(requests: Sequence[RequestLog], *, chains: bool) -> ModelSize:
    """Returns the model size chosen by AIC: first the depth parameters, then the classes.

    Logs with counts of passes only lack their order, so they get one class. For them and for trees
    (not ``chains``), every depth has a parameter.
    """

    def best_of(classes: Sequence[int], bins: Sequence[tuple[int, ...]]) -> ModelSize:
        sizes = [ModelSize(number, each) for number in classes for each in bins]
        return min(sizes, key=lambda size: fit_model(requests, size)[1])

    data = observe(requests)
    levels = int(data.depths[data.hits != _UNKNOWN].max()) + 1
    ordered, bins = all(request.ordered for request in requests), tuple(range(levels))
    if ordered and chains:
        bins = best_of([1], [(0,), _FEW[:levels]]).bins
    return best_of([1, 2, 3] if ordered else [1], [bins])
