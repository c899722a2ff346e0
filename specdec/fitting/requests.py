"""Acceptance of one request as read from a log: accepted draft tokens per pass, or pass counts.

Shape letters: N passes (or kinds of passes, if a log has only counts), T positions, K draft
tokens per pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specdec.errors import UserError
from specdec.fitting.tails import RankVector
from specdec.types import FloatArray, IntArray

UNKNOWN = -1
"""Marks a position whose draft token was never verified."""

_MOST = 4096  # most tokens of a pass


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLog:
    """The acceptance of one request.

    Attributes:
        accepted: int64[N], accepted draft tokens of each pass.
        counts: float64[N], number of such passes; all 1 if ``ordered``.
        drafted: int64[N], verified draft tokens of each pass; None if the log has none.
        ordered: whether passes follow each other in the text.
        turns: number of passes in each turn of a dialogue.
        matches: int64[T], used instead of passes: 1 right, 0 wrong, ``UNKNOWN``; None for passes.
        totals_only: the log has only a mean; ``counts`` assume a constant hit rate.
    """

    name: str
    accepted: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    counts: FloatArray = field(default_factory=lambda: np.zeros(0))
    drafted: IntArray | None = None
    ordered: bool = True
    turns: tuple[int, ...] = ()
    matches: IntArray | None = None
    totals_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceLog:
    """The content of a file: requests, or a rank vector; ``notes`` say what was inferred."""

    path: str
    form: str
    requests: tuple[RequestLog, ...] = ()
    vector: RankVector | None = None
    notes: tuple[str, ...] = ()


def whole_numbers(values: Any, where: str, least: int = 0) -> IntArray:
    """Converts a list of whole numbers to int64[N]; ``where`` names it in the ``UserError``."""
    good = isinstance(values, list) and all(
        (type(v) is int or (type(v) is float and v.is_integer())) and least <= v <= _MOST
        for v in values
    )
    if not good:
        raise UserError(f"{where} must be a list of whole numbers from {least} to {_MOST}")
    return np.array(values, np.int64)


def of_passes(
    name: str,
    accepted: IntArray,
    *,
    drafted: IntArray | None = None,
    turns: Sequence[int] = (),
) -> RequestLog:
    if drafted is not None and len(drafted) != len(accepted):
        drafted = None
    fits = sum(turns) == len(accepted)
    return RequestLog(
        name=name,
        accepted=accepted,
        counts=np.ones(len(accepted)),
        drafted=drafted,
        turns=tuple(turns) if fits else (len(accepted),),
    )


def of_histogram(
    name: str, counts: FloatArray, draft_tokens: int | None, *, totals_only: bool = False
) -> RequestLog:
    """Returns a request in which ``counts[j]`` passes accepted j of ``draft_tokens`` tokens."""
    longest = max(draft_tokens or 0, len(counts) - 1)
    return RequestLog(
        name=name,
        accepted=np.arange(len(counts)),
        counts=np.asarray(counts, float),
        drafted=np.full(len(counts), longest) if draft_tokens else None,
        ordered=False,
        totals_only=totals_only,
    )


def of_rates(name: str, passes: float, rates: Sequence[float]) -> RequestLog:
    """Returns a request in which ``rates[i]`` of the passes accepted the draft token at depth i."""
    edges = np.array([1.0, *rates, 0.0])
    if (np.diff(edges) > 0.02).any() or (edges < 0).any() or not np.isfinite(edges).all():
        raise UserError(
            f"{name}: acceptance by position {list(rates)} must fall from at most 1 to at least 0"
        )
    counts = passes * np.maximum(-np.diff(edges), 0.0)
    return of_histogram(name, counts, len(rates))


def of_totals(name: str, passes: float, accepted: float, draft_tokens: float) -> RequestLog:
    """Returns a request of which only totals are known, with the same hit rate at every position.

    ``accepted`` is the number of draft tokens in all passes, and ``draft_tokens`` that per pass.
    """
    longest = max(round(draft_tokens), 1)
    if passes <= 0 or not 0 <= accepted <= passes * longest * 1.001:
        raise UserError(
            f"{name}: {accepted:g} accepted draft tokens in {passes:g} passes of {longest} draft"
            " tokens is not possible; state draft_tokens=K"
        )
    mean, low, high = accepted / passes, 0.0, 1.0
    powers = np.arange(1, longest + 1)
    for _ in range(60):
        rate = (low + high) / 2
        low, high = (rate, high) if (rate**powers).sum() < mean else (low, rate)
    survive = high ** np.arange(longest + 1)
    counts = passes * np.append(survive[:-1] - survive[1:], survive[-1])
    return of_histogram(name, counts, longest, totals_only=True)
