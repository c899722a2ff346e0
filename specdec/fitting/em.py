"""Maximum-likelihood fit of a hit law by expectation maximisation.

Shape letters: S segments, T positions, G groups, C classes, D depths. Segments are the last axis
because there are many of them, and only one to three groups and classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from specdec.fitting.law import HitLaw
from specdec.fitting.observations import Observations
from specdec.fitting.requests import UNKNOWN
from specdec.types import FloatArray, IntArray

_FLOOR = 1e-4  # least value of weights, hit rates and their complements
_MOST_STAY = 0.995
_MAX_DEPTH = 6.0  # largest change of log odds by depth
_CLOSE = 0.01  # relative error of tokens per pass that counts as agreement
_HALVINGS = 12  # bisections of the interval of shifts, from width 2 to 0.0005
_SPREAD = 0.8  # below this share of the measured spread, groups may cost some likelihood
_PATIENCE = 10.0  # how much AIC such groups may cost
_GAIN = 0.01  # the iteration ends at a smaller gain of log likelihood
_LEAST_MASS = 30.0  # observations that a depth needs to get a separate parameter
_LEAST_PROMPTS = 5  # needed to fit groups


Depths = Literal["one", "few", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The number of parameters that a law has.

    Attributes:
        groups, classes: G and C.
        depths: "one": the hit rate does not depend on the depth; "few": depths 0, 1, 2 to 3, and 4
            or more have separate parameters; "all": every depth with enough observations has one.
    """

    groups: int = 1
    classes: int = 1
    depths: Depths = "one"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A fitted law; ``aic`` is Akaike's criterion, 2 parameters - 2 log likelihood."""

    law: HitLaw
    size: Size
    log_likelihood: float
    aic: float


def fit_law(data: Observations, size: Size, *, iterations: int = 150) -> Fit:
    """Fits a law; ends early if an iteration raises the log likelihood by less than 0.01."""
    bins = _depth_bins(data, size.depths)
    binned = replace(data, depths=bins[data.depths])
    law, before, value = _start(binned, size, int(bins.max()) + 1), -np.inf, -np.inf
    for _ in range(iterations):
        law, value = _iterate(binned, law, size.depths != "one")
        if value - before < _GAIN:
            break
        before = value
    aic = 2.0 * (law.num_parameters - value)
    expanded = replace(law, depth=law.depth[bins])
    return Fit(law=expanded, size=size, log_likelihood=value, aic=aic)


def log_likelihood(data: Observations, law: HitLaw) -> float:
    return _iterate(data, law, False)[1]


def choose_law(
    data: Observations,
    *,
    ordered: bool,
    error: Callable[[HitLaw], float],
    spread: Callable[[HitLaw], float],
    chains: bool = True,
) -> Fit:
    """Chooses the law of smallest AIC whose predicted tokens per pass agree with the data.

    Depths are chosen first, then classes, then groups. Two kinds of law are chosen only if no other
    is left. First, laws whose tokens per pass differ from those of the data by more than 1 %, as
    happens when acceptance varies much between requests; ``calibrated`` corrects them. Second, laws
    of ordered chains whose hit rate rises with depth: the reason is easy text, in which passes are
    longer, and classes describe that better. Groups are also added if requests differ clearly more
    than under the law without groups.

    Args:
        ordered: whether passes follow each other in the text. If not, classes cannot be told from
            depths, and one class is used.
        error: returns the relative error of a law's tokens per pass.
        spread: returns the spread of tokens per pass between requests under a law over the data's.
        chains: False for passes that verify trees, whose shape affects the hit rate at each depth.
    """

    def fitted(size: Size) -> tuple[bool, Fit]:
        fit = fit_law(data, size)
        rises = chains and ordered and float(fit.law.depth[1:].sum()) > 0.0
        second = rises or abs(error(fit.law)) > _CLOSE
        return second, calibrated(fit, data, error)

    def rank(candidate: tuple[bool, Fit]) -> tuple[bool, float]:
        return candidate[0], candidate[1].aic

    def best_of(*fits: tuple[bool, Fit]) -> tuple[bool, Fit]:
        return min(fits, key=rank)

    depths: tuple[Depths, ...] = ("one", "few", "all") if chains and ordered else ("all",)
    singles = [fitted(Size(depths=d)) for d in depths]
    best = best_of(*singles)
    if ordered:
        for classes in (2, 3):
            sizes = {best[1].size.depths, "one"} if chains else {best[1].size.depths}
            new = [fitted(Size(classes=classes, depths=d)) for d in sorted(sizes)]
            grown = best_of(best, *new)
            if grown is best:
                break
            best = grown
    if len(set(data.prompts.tolist())) >= _LEAST_PROMPTS:
        classes = max(best[1].size.classes, 2) if ordered else 1
        for groups in (2, 3):
            size = replace(best[1].size, groups=groups, classes=classes)
            grown = fitted(size)
            alike = rank(grown) < (best[0], best[1].aic + _PATIENCE)
            if best_of(best, grown) is best and not (alike and spread(best[1].law) < _SPREAD):
                break
            best = grown
    return best[1]


def calibrated(fit: Fit, data: Observations, error: Callable[[HitLaw], float]) -> Fit:
    """Shifts all log odds of a law such that ``error`` becomes 0, if it exceeds 1 %.

    A law that no shift of at most 1 corrects is returned unchanged. ``error`` returns the relative
    error of a law's tokens per pass, which increases with the hit rates.
    """

    def shifted(by: float) -> HitLaw:
        odds = np.log(fit.law.top1) - np.log1p(-fit.law.top1) + by
        return replace(fit.law, top1=np.clip(1.0 / (1.0 + np.exp(-odds)), _FLOOR, 1.0 - _FLOOR))

    first = error(fit.law)
    if abs(first) <= _CLOSE or error(shifted(-1.0)) * error(shifted(1.0)) > 0.0:
        return fit
    low, high = -1.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        low, high = (middle, high) if error(shifted(middle)) < 0.0 else (low, middle)
    law = shifted((low + high) / 2.0)
    value = log_likelihood(data, law)
    aic = fit.aic + 2.0 * (1.0 + fit.log_likelihood - value)  # the shift is a parameter
    return replace(fit, law=law, log_likelihood=value, aic=aic)


def _depth_bins(data: Observations, depths: str) -> IntArray:
    """Returns int64[D], the index of the parameter that each depth uses."""
    known = data.hits != UNKNOWN
    last = int(data.depths.max(initial=0))
    if depths == "one":
        return np.zeros(last + 1, np.int64)
    if depths == "few":
        most = min(last, 4) if last < 2 else 3
        return np.minimum(np.array([0, 1, 2, 2, *[3] * max(last - 3, 0)])[: last + 1], most)
    mass = np.bincount(data.depths[known], weights=_mass(data)[known], minlength=last + 1)
    bins, filled = np.zeros(last + 1, np.int64), mass[0]
    for depth in range(1, last + 1):
        opens = filled >= _LEAST_MASS and mass[depth:].sum() >= _LEAST_MASS
        bins[depth] = bins[depth - 1] + int(opens)
        filled = mass[depth] if opens else filled + mass[depth]
    return bins


def _mass(data: Observations) -> FloatArray:
    mass: FloatArray = np.broadcast_to(data.weights[:, None], data.hits.shape)
    return mass


def _start(data: Observations, size: Size, depths: int) -> HitLaw:
    """Returns initial parameters; easy classes stay longer, because misses cluster in real text."""
    known = data.hits != UNKNOWN
    mass = _mass(data) * known
    rate = float(np.clip((mass * (data.hits == 1)).sum() / max(mass.sum(), 1.0), 0.02, 0.98))
    classes, groups = size.classes, size.groups
    spread = np.linspace(-1.5, 1.5, classes) if classes > 1 else np.zeros(1)
    tilt = np.linspace(-0.8, 0.8, groups) if groups > 1 else np.zeros(1)
    weights = np.exp(tilt[:, None] * np.linspace(-1.0, 1.0, classes)[None])
    return HitLaw(
        group_shares=np.full(groups, 1.0 / groups),
        weights=weights / weights.sum(axis=1, keepdims=True),
        stay=np.linspace(0.7, 0.95, classes) if classes > 1 else np.zeros(1),
        top1=1.0 / (1.0 + np.exp(-(np.log(rate / (1 - rate)) + spread))),
        depth=np.zeros(depths),
    )


def _iterate(data: Observations, law: HitLaw, by_depth: bool) -> tuple[HitLaw, float]:
    """Runs one step of expectation maximisation; also returns the log likelihood before it."""
    groups, classes = law.weights.shape
    likelihood = _likelihood(data, law)  # [T, C, S]
    forward, scale = _forward(likelihood, law, law.shares())  # [T, G, C, S], [T, G, S]
    by_segment = np.log(scale).sum(axis=0) * data.weights  # [G, S]
    num_prompts = int(data.prompts.max()) + 1
    by_prompt = np.zeros((num_prompts, groups))
    np.add.at(by_prompt, data.prompts, by_segment.T)
    joint = by_prompt + np.log(law.group_shares)
    top = joint.max(axis=1, keepdims=True)
    total = top[:, 0] + np.log(np.exp(joint - top).sum(axis=1))
    posterior = np.exp(joint - total[:, None])  # [prompts, G]
    mass = posterior.T[:, data.prompts] * data.weights  # [G, S]
    occupied, kept, redrawn, first = _backward(likelihood, law, forward, scale, mass)
    counts = _counts(data, occupied, len(law.depth))
    top1, depth = _emissions(law, counts, by_depth)
    stay = law.stay
    if classes > 1:
        stay = np.clip(kept / np.maximum(kept + redrawn.sum(axis=(0, 2)), _FLOOR), 0.0, _MOST_STAY)
    drawn = redrawn.sum(axis=1) + first * (1.0 - stay)  # a start counts as a draw in part
    weights = np.maximum(drawn, _FLOOR * np.maximum(drawn.sum(axis=1, keepdims=True), 1.0))
    lengths = np.bincount(data.prompts, weights=data.weights * (data.hits != UNKNOWN).sum(axis=1))
    # Shares of positions, not of prompts, so that long requests count more.
    shares = np.maximum(lengths @ posterior, _FLOOR * lengths.sum())
    new = HitLaw(
        group_shares=shares / shares.sum(),
        weights=weights / weights.sum(axis=1, keepdims=True),
        stay=stay,
        top1=top1,
        depth=depth,
    )
    return new, float(total.sum())


def _likelihood(data: Observations, law: HitLaw) -> FloatArray:
    """Returns float64[T, C, S], each observation's probability by class; 1 if it is unknown."""
    rates = law.hit_rates(len(law.depth))  # [C, D]
    hits, depth = data.hits.T, np.minimum(data.depths.T, len(law.depth) - 1)
    result = np.empty((hits.shape[0], len(rates), hits.shape[1]))
    for number, rate in enumerate(rates):
        chance = rate[depth]
        chance = np.where(hits == 1, chance, 1.0 - chance)
        result[:, number] = np.where(hits != UNKNOWN, chance, 1.0)
    return result


def _forward(
    likelihood: FloatArray, law: HitLaw, start: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Returns scaled forward probabilities [T, G, C, S] and their scales [T, G, S], float64."""
    length, classes, segments = likelihood.shape
    groups = len(law.weights)
    forward = np.empty((length, groups, classes, segments))
    scale = np.empty((length, groups, segments))
    current = np.broadcast_to(start[..., None], (groups, classes, segments))
    stay, weights = law.stay[:, None], law.weights[:, :, None]
    for at in range(length):
        current = current * likelihood[at]
        scale[at] = current.sum(axis=1)
        current = current / scale[at][:, None]
        forward[at] = current
        left = (current * (1.0 - stay)).sum(axis=1)
        current = current * stay + left[:, None] * weights
    return forward, scale


def _backward(
    likelihood: FloatArray, law: HitLaw, forward: FloatArray, scale: FloatArray, mass: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Expected counts: (occupied [T, C, S], kept [C], redrawn [G, C from, C to], first [G, C])."""
    length, groups, classes, segments = forward.shape
    occupied = np.empty((length, classes, segments))
    kept = np.zeros(classes)
    redrawn = np.zeros((groups, classes, classes))
    stay, weights = law.stay[:, None], law.weights[:, :, None]
    backward = np.ones((groups, classes, segments))
    for at in range(length - 1, -1, -1):
        posterior = forward[at] * backward * mass[:, None]
        occupied[at] = posterior.sum(axis=0)
        if at == 0:
            break
        ahead = backward * likelihood[at] / scale[at][:, None]  # [G, C, S]
        before = forward[at - 1] * mass[:, None]
        kept += (before * stay * ahead).sum(axis=(0, 2))
        drawn = ahead * weights
        redrawn += (before * (1.0 - stay)) @ drawn.transpose(0, 2, 1)
        backward = stay * ahead + (1.0 - stay) * drawn.sum(axis=1)[:, None]
    return occupied, kept, redrawn, posterior.sum(axis=2)


def _counts(data: Observations, occupied: FloatArray, depths: int) -> FloatArray:
    """Returns float64[2, C, D], expected misses and hits by class and depth."""
    counts = np.zeros((2, occupied.shape[1], depths))
    hits, depth = data.hits.T, np.minimum(data.depths.T, depths - 1)
    for hit in (0, 1):
        chosen = hits == hit
        for number, row in enumerate(counts[hit]):
            row += np.bincount(depth[chosen], occupied[:, number][chosen], minlength=depths)
    return counts


def _emissions(law: HitLaw, counts: FloatArray, by_depth: bool) -> tuple[FloatArray, FloatArray]:
    """Returns the most likely (top1 [C], depth [D]), by Newton steps on the log odds of each."""
    misses, hits = counts
    if not by_depth:
        total = np.maximum((misses + hits).sum(axis=1), _FLOOR)
        return np.clip(hits.sum(axis=1) / total, _FLOOR, 1.0 - _FLOOR), law.depth
    odds = np.log(law.top1) - np.log1p(-law.top1)
    depth = law.depth.copy()
    for _ in range(4):
        for axis in (1, 0):
            rate = 1.0 / (1.0 + np.exp(-(odds[:, None] + depth)))
            slope = (hits - (hits + misses) * rate).sum(axis=axis)
            curve = ((hits + misses) * rate * (1.0 - rate)).sum(axis=axis) + 0.5  # a weak prior
            change = np.clip(slope / curve, -1.0, 1.0)
            if axis == 1:
                odds = np.clip(odds + change, np.log(_FLOOR), -np.log(_FLOOR))
            else:
                change[0] = 0.0
                depth = np.clip(depth + change, -_MAX_DEPTH, _MAX_DEPTH)
    return 1.0 / (1.0 + np.exp(-odds)), depth
