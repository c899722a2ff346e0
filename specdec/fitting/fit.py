from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specdec.errors import UserError
from specdec.fitting.em import Fit, Size, calibrated, choose_law, fit_law, log_likelihood
from specdec.fitting.law import HitLaw
from specdec.fitting.observations import DraftedRequest, observe, samples_of
from specdec.fitting.predict import measured, predicted, simulated_spread
from specdec.fitting.requests import AcceptanceLog
from specdec.fitting.tails import RankTail, RankVector, class_decays, fit_tail, tail_of

_Z = 1.96  # half width of a 95 % interval in standard errors
_LEAST = 20.0  # verified draft tokens, fewer are refused


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutCheck:
    """Compares measured tokens per pass of some requests with a law's prediction.

    ``low`` and ``high`` bound the 95 % interval of what such requests would measure if the law were
    right, from the spread between requests in the fitted and the checked part; NaN if there is
    none. ``draft_tokens`` is the mean number per pass.
    """

    name: str
    requests: int
    draft_tokens: float
    measured: float
    predicted: float
    low: float
    high: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1.0

    @property
    def is_inside(self) -> bool:
        return self.low <= self.measured <= self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodness:
    """How well a law of the same size, fitted to a part of the requests, describes the others.

    Attributes:
        gain: log likelihood per held-out draft token above that of one constant hit rate, in nats.
        spread: standard deviation of tokens per pass between all requests.
        law_spread, binomial_spread: the same under the law, and under one constant hit rate.
    """

    check: HeldOutCheck
    gain: float
    spread: float
    law_spread: float
    binomial_spread: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedLaw:
    """The law that was fitted to all requests, and the result of checking it.

    Attributes:
        tail: ranks of the target's token where the first candidate is wrong.
        covers_tree: whether a hit means that any node of a tree was right.
        goodness: held-out check; None for fewer than four requests.
        checks: predictions for further logs.
        notes: what was inferred rather than stated in the logs.
    """

    law: HitLaw
    tail: RankTail
    tail_source: str
    covers_tree: bool
    requests: int
    draft_tokens: float
    goodness: Goodness | None = None
    checks: tuple[HeldOutCheck, ...] = ()
    notes: tuple[str, ...] = field(default_factory=tuple)

    def model_option(self) -> dict[str, Any]:
        """Returns the keys of ``model=synthetic`` that this law sets."""
        law = self.law
        decays = class_decays(law.top1, self.tail)
        option: dict[str, Any] = {
            "weights": _rounded(law.weights[0]),
            "top1": _rounded(law.top1),
            "decay": _rounded(decays),
            "miss": _rounded(np.full(len(law.top1), self.tail.miss)),
        }
        if len(law.weights) > 1:
            option["weights"] = _rounded(law.group_shares @ law.weights)
            option["group_shares"] = _rounded(law.group_shares)
            option["group_weights"] = _rounded(law.weights)
        if law.stay.any():
            option["stay"] = _rounded(law.stay)
        if law.depth.any():
            option["depth"] = _rounded(law.depth)
        if self.covers_tree:
            option["covers"] = "tree"
        return option


def fit_logs(
    logs: Sequence[AcceptanceLog],
    *,
    covers_tree: bool = False,
    holdout: int = 3,
    checks: Sequence[AcceptanceLog] = (),
) -> FittedLaw:
    """Fits a law to logs of one pair of models; ranks come from the log with a rank vector, if any.

    Args:
        covers_tree: whether the passes verified trees.
        holdout: every ``holdout``-th request is left out of the fit that is checked. The returned
            law is fitted to all requests.
        checks: further logs of the pair, whose tokens per pass are predicted.
    """
    vectors = [log.vector for log in logs if log.vector is not None]
    if len(vectors) > 1:
        raise UserError("a law has one rank vector: give one file of them")
    vector = vectors[0] if vectors else None
    samples: list[DraftedRequest] = []
    notes: list[str] = []
    for log in logs:
        found, note = samples_of(log)
        found = [s for s in found if s.passes or s.request.matches is not None]
        samples += found
        notes += [*log.notes, *([note] if note else [])]
    if any(sample.request.totals_only for sample in samples):
        notes.append("totals only: the same hit rate is assumed at every position of a pass")
    if not samples:
        if vector is None:
            raise UserError("the logs have no target passes: there is nothing to fit")
        return _of_vector(vector)
    data = observe(samples)
    known = data.num_known
    if known < _LEAST:
        raise UserError(
            f"the logs have {known:g} verified draft tokens, too few to fit a law: give at least"
            f" {_LEAST:g}"
        )
    chosen = _chosen(samples, covers_tree)
    tail = tail_of(chosen.law.hit_rate()) if vector is None else fit_tail(vector)
    return FittedLaw(
        law=chosen.law,
        tail=tail,
        tail_source="regression over 16 rank vectors" if vector is None else vector.name,
        covers_tree=covers_tree,
        requests=len(samples),
        draft_tokens=known,
        goodness=_goodness(samples, chosen, holdout),
        checks=tuple(_further(chosen.law, samples, log) for log in checks),
        notes=tuple(dict.fromkeys(notes)),
    )


def _of_vector(vector: RankVector) -> FittedLaw:
    law = HitLaw(
        group_shares=np.ones(1),
        weights=np.ones((1, 1)),
        stay=np.zeros(1),
        top1=vector.shares[:1],
        depth=np.zeros(1),
    )
    return FittedLaw(
        law=law,
        tail=fit_tail(vector),
        tail_source=vector.name,
        covers_tree=False,
        requests=0,
        draft_tokens=0.0,
        notes=("a rank vector has no positions: one hit rate for all of them",),
    )


def _chosen(samples: Sequence[DraftedRequest], covers_tree: bool) -> Fit:
    part = measured(samples)
    return choose_law(
        observe(samples),
        ordered=all(sample.request.ordered for sample in samples),
        error=_error_on(samples),
        spread=lambda law: simulated_spread(law, samples) / part.spread if part.spread else 1.0,
        chains=not covers_tree,
    )


def _error_on(samples: Sequence[DraftedRequest]) -> Callable[[HitLaw], float]:
    """Returns a function from a law to the relative error of its tokens per pass on the samples."""
    mean = measured(samples).mean
    return lambda law: predicted(law, samples) / mean - 1.0


def _goodness(samples: Sequence[DraftedRequest], chosen: Fit, holdout: int) -> Goodness | None:
    if len(samples) < 4:
        return None
    held = [s for at, s in enumerate(samples) if at % holdout == holdout - 1]
    kept = [s for at, s in enumerate(samples) if at % holdout != holdout - 1]
    data = observe(kept)
    law = calibrated(fit_law(data, chosen.size), data, _error_on(kept)).law
    constant = fit_law(data, Size()).law
    unseen = observe(held)
    gain = log_likelihood(unseen, law) - log_likelihood(unseen, constant)
    return Goodness(
        check=_check(law, "held-out requests", kept, held),
        gain=gain / max(unseen.num_known, 1.0),
        spread=measured(samples).spread,
        law_spread=simulated_spread(law, samples),
        binomial_spread=simulated_spread(constant, samples),
    )


def _further(law: HitLaw, fitted: Sequence[DraftedRequest], log: AcceptanceLog) -> HeldOutCheck:
    if not log.requests:
        raise UserError(f"{log.path!r} has ranks and no passes, so it cannot be a check")
    return _check(law, log.path, fitted, samples_of(log)[0])


def _check(
    law: HitLaw, name: str, fitted: Sequence[DraftedRequest], new: Sequence[DraftedRequest]
) -> HeldOutCheck:
    """Predicts new requests; the interval has the relative sampling errors of both parts."""
    value, old, fresh = predicted(law, new), measured(fitted), measured(new)
    parts = [part.standard_error / part.mean for part in (old, fresh)]
    known = [part for part in parts if not math.isnan(part)]
    error = value * math.sqrt(sum(part**2 for part in known)) if known else float("nan")
    drafted = [(float(s.drafted @ s.request.counts), s.passes) for s in new if s.passes]
    return HeldOutCheck(
        name=name,
        requests=len(new),
        draft_tokens=sum(d for d, _ in drafted) / max(sum(p for _, p in drafted), 1e-9),
        measured=fresh.mean,
        predicted=value,
        low=value - _Z * error,
        high=value + _Z * error,
    )


def _rounded(values: np.ndarray) -> Any:
    return np.round(values, 4).tolist()
