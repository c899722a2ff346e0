"""Acceptance of requests: accepted and verified draft tokens of each pass.

Shape letters: N passes, or kinds of passes if a log has only counts.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import brentq

from specdec.errors import UserError
from specdec.types import FloatArray, IntArray

_ADAPTIVE_START = 5  # draft tokens of the first pass of transformers' assisted generation


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLog:
    accepted: IntArray  # int64[N], accepted draft tokens of each pass
    counts: FloatArray  # float64[N], number of such passes; all 1 if ordered
    drafted: IntArray | None = None  # int64[N], verified draft tokens, if the log has them
    ordered: bool = True  # whether passes follow each other in the text
    turns: tuple[int, ...] = ()  # passes in each turn of a dialogue; empty for a single turn
    adaptive: bool = False  # drafted follows the schedule of transformers' assisted generation
    method: str = ""  # the pair or method that the log names
    notes: tuple[str, ...] = ()  # what was inferred rather than stated in the log


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceLog:
    path: str
    requests: tuple[RequestLog, ...]


def of_passes(
    accepted: IntArray, draft_tokens: int | IntArray | None = None, turns: Sequence[int] = ()
) -> RequestLog:
    count = len(accepted)
    drafted = None if draft_tokens is None else np.broadcast_to(draft_tokens, count)
    turns = tuple(turns) if sum(turns) == count else ()
    return RequestLog(accepted=accepted, counts=np.ones(count), drafted=drafted, turns=turns)


def of_matches(text: str) -> RequestLog:
    """Returns a request from a text with 1 (right), 0 (wrong) or ? (unknown, ends the pass) per
    position, in passes of 7 draft tokens.
    """
    passes = re.findall("1{0,6}[0?]|1{7}.|1+$", text)
    accepted = np.array([len(shown) - 1 for shown in passes])
    judged = np.array([shown[-1] == "0" for shown in passes])
    return of_passes(accepted, np.where(judged, 7, accepted))


def of_histogram(counts: Sequence[float] | FloatArray, draft_tokens: int | None) -> RequestLog:
    array, accepted = np.asarray(counts, float), np.arange(len(counts))
    if not (array >= 0).all():
        raise UserError(f"a histogram of accepted tokens has counts of at least 0, not {counts}")
    longest = max(draft_tokens or 0, len(counts) - 1)
    drafted = np.full(len(counts), longest) if draft_tokens else None
    return RequestLog(accepted=accepted, counts=array, drafted=drafted, ordered=False)


def of_rates(passes: float, rates: Sequence[float]) -> RequestLog:
    falls = -np.diff([1.0, *rates, 0.0])
    if not (falls >= -0.02).all() or not min(rates) >= 0:
        raise UserError(f"acceptance by position {rates} must fall from at most 1 to at least 0")
    return of_histogram(passes * np.maximum(falls, 0.0), len(rates))


def of_totals(accepted: float, drafted: float, passes: float, k: int | None) -> RequestLog:
    """Returns a request from totals, with the same hit rate at every position. ``k`` is the number
    of draft tokens per pass; None: their mean.
    """
    passes = drafted / k if k else passes
    longest = k or max(round(drafted / passes), 1) if passes else 0
    if not 0 <= accepted <= passes * longest * 1.001 or not longest:
        raise UserError(
            f"{accepted:g} accepted of {drafted:g} draft tokens in {passes:g} passes do not give"
            " the draft tokens per pass: give draft_tokens=K"
        )
    mean, powers = min(accepted / passes, longest), np.arange(longest + 1)
    rate = brentq(lambda rate: (rate ** powers[1:]).sum() - mean, 0.0, 1.0)
    counts = -passes * np.diff(rate**powers, append=0.0)
    note = "totals only: the same hit rate is assumed at every position of a pass"
    return replace(of_histogram(counts, longest), notes=(note,))


def with_draft_tokens(log: AcceptanceLog) -> list[RequestLog]:
    """Returns the requests of a log that have passes, with draft tokens per pass (``drafted``).
    Missing numbers follow the schedule of transformers' assisted generation if every pass obeys it
    and one accepts more than 5; otherwise each is the largest number of accepted tokens of a pass.
    """
    requests = [request for request in log.requests if request.counts.any()]
    unknown = [request for request in requests if request.drafted is None]
    most = max((int(request.accepted.max()) for request in unknown), default=0)
    plans = [_schedule(request) for request in unknown]
    obeyed = all((r.accepted <= p).all() and r.ordered for r, p in zip(unknown, plans, strict=True))
    note = f"draft tokens per pass taken as {most}, the most accepted"
    if adaptive := obeyed and most > _ADAPTIVE_START:
        note = "draft tokens per pass by the schedule of transformers' assisted generation, which"
        note += " every pass obeys"
    else:
        plans = [np.full(len(plan), max(most, 1)) for plan in plans]
    return [request for request in requests if request.drafted is not None] + [
        replace(request, drafted=plan, adaptive=adaptive, notes=(*request.notes, note))
        for request, plan in zip(unknown, plans, strict=True)
    ]


def _schedule(request: RequestLog) -> IntArray:
    """Returns int64[N], draft tokens by transformers' schedule: 5 at the start of each turn, then 2
    more after all were accepted, else 1 less (at least 1).
    """
    starts = {0, *np.cumsum(request.turns).tolist()}
    plan: list[int] = []
    for at, accepted in enumerate([0, *request.accepted.tolist()][:-1]):
        after = _ADAPTIVE_START if at in starts else max(plan[-1] - 1, 1)
        plan.append(plan[-1] + 2 if at not in starts and accepted == plan[-1] else after)
    return np.array(plan)
