"""Why draft tokens were rejected: how draft and target rated each decided token, and the counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields
from io import BytesIO
from typing import Any

import numpy as np
import pandas as pd

from specdec.device import Probs, on_host
from specdec.types import FloatArray, IntArray

_DIGITS = 6

REASONS = (
    "accepted: in the tree",
    "a candidate of the draft that the tree had no room for",
    "not among the draft's candidates",
    "the draft had not proposed anything there",
)
"""Whether the target's token was accepted, and why not."""

_SHARES = ("share_accepted", "share_no_room", "share_not_a_candidate", "share_no_proposal")
_EDGES = {1: "1", 2: "2", 4: "3-4", 8: "5-8", 16: "9-16", 32: "17-32"}  # last rank -> its bin
RANKS = (*_EDGES.values(), "33+", "none")
"""Bins of the draft's rank of the target's token; none: the token was not a candidate."""

_BLUE, _PALE, _RED = "#0070a8", "#b9d6e8", "#b00020"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """The probabilities that draft and target gave to the children of an answered node.

    Attributes:
        tokens, logprobs: [K], the draft's candidates; those in the tree have logprob -inf.
        target: float64[V], the target's distribution; None if the run does not compute it.
    """

    tokens: IntArray
    logprobs: FloatArray
    target: Probs | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """How the draft and the target rated the token that was decided after a node.

    Ranks are by probability, 1 the most probable. The *top* candidate is the draft's most probable
    one. Values are None without candidates; the target's also if its distribution is unknown.
    """

    rank: int  # of the token among the draft's candidates; 0 if it is not one
    candidates: int  # number of the draft's candidates; 0 if it had proposed none
    in_tree: bool  # whether the token was a child of the node
    draft_prob: float | None = None  # of the token; None if it is not a candidate
    top_prob: float | None = None  # draft probability of the top candidate
    top_target_prob: float | None = None  # target probability of the top candidate
    top_target_rank: int | None = None  # the target's rank of the top candidate

    def row(self) -> list[Any]:
        return list(astuple(self))


def judgement(proposal: Proposal | None, children: Mapping[int, float], token: int) -> Judgement:
    """Rates a decided token.

    Args:
        proposal: of the node that the token follows; None if its answer was not recorded.
        children: token -> log draft probability of the node's children in the tree.
    """
    logprobs = dict(children)
    if proposal is not None:
        for other, value in zip(proposal.tokens.tolist(), proposal.logprobs.tolist(), strict=True):
            if value > -np.inf:
                logprobs.setdefault(other, value)
    if not logprobs:
        return Judgement(rank=0, candidates=0, in_tree=False)
    own, top = logprobs.get(token), max(logprobs, key=lambda other: logprobs[other])
    target_prob = target_rank = None
    if proposal is not None and proposal.target is not None:
        target = on_host(proposal.target)
        target_prob = round(float(target[top]), _DIGITS)
        target_rank = 1 + int(np.count_nonzero(target > target[top]))
    return Judgement(
        rank=0 if own is None else 1 + sum(value > own for value in logprobs.values()),
        candidates=len(logprobs),
        in_tree=token in children,
        draft_prob=None if own is None else round(float(np.exp(own)), _DIGITS),
        top_prob=round(float(np.exp(logprobs[top])), _DIGITS),
        top_target_prob=target_prob,
        top_target_rank=target_rank,
    )


def judgements(trees: Mapping[str, Any]) -> pd.DataFrame:
    """Returns a pandas frame with one row per decided token of a ``trees.json``.

    Columns: those of ``Judgement``, ``reason`` (one of ``REASONS``), ``bin`` and ``target_bin``
    (the ranks' bins). It is empty for files of earlier versions.
    """
    rows = [
        row
        for request in trees["requests"]
        for step in request["steps"]
        for row in (step["commit"] or {}).get("judged", ())
    ]
    table = pd.DataFrame(rows, columns=[field.name for field in fields(Judgement)])
    cases = [table["in_tree"] == True, table["candidates"] == 0, table["rank"] == 0]  # noqa: E712
    table["reason"] = np.select(cases, [REASONS[0], REASONS[3], REASONS[2]], REASONS[1])
    for column, rank in (("bin", "rank"), ("target_bin", "top_target_rank")):
        ranks = table[rank].astype(float).replace(0, np.inf)
        edges = [0.0, *_EDGES, np.finfo(float).max, np.inf]
        table[column] = pd.cut(ranks, edges, labels=list(RANKS))
    return table


def rejection_metrics(trees: Mapping[str, Any]) -> dict[str, float]:
    """Returns shares of the reasons, and mean probabilities of rejected first choices, by name.

    The draft's *first choice* is its most probable candidate; the means cover rejections where it
    had candidates. Empty without judged tokens; the target's mean needs its distribution.
    """
    table = judgements(trees)
    if table.empty:
        return {}
    shares = table["reason"].value_counts(normalize=True)
    rejected = _rejected(table)
    means = {
        "target_prob_of_rejected": rejected["top_target_prob"].astype(float).mean(),
        "draft_prob_of_rejected": rejected["top_prob"].astype(float).mean(),
    }
    found = {name: shares.get(reason, 0.0) for name, reason in zip(_SHARES, REASONS, strict=True)}
    return {name: float(value) for name, value in (found | means).items() if not np.isnan(value)}


def _rejected(table: pd.DataFrame) -> pd.DataFrame:
    return table[(table["candidates"] > 0) & (table["reason"] != REASONS[0])]


def rejections_png(trees: Mapping[str, Any], *, title: str = "") -> bytes | None:
    """Plots the draft's ranks of the target's tokens, the reasons, and any known target ranks.

    Returns None without judged tokens.
    """
    from matplotlib.figure import Figure  # takes a second to import

    table = judgements(trees)
    if table.empty:
        return None
    target_bins = _rejected(table)["target_bin"].value_counts(sort=False)[list(RANKS[:-1])]
    figure = Figure(figsize=(13.0, 3.9), dpi=150, layout="constrained")
    ranks, reasons, *target = figure.subplots(1, 3 if target_bins.any() else 2)
    proposed = table[table["candidates"] > 0]
    counts = pd.crosstab(proposed["bin"], proposed["in_tree"].astype(bool), dropna=False)
    counts = counts.reindex(index=list(RANKS), columns=[True, False], fill_value=0)
    ranks.bar(RANKS, counts[True], color=_BLUE, label="in the tree: accepted")
    ranks.bar(RANKS, counts[False], bottom=counts[True], color=_PALE, label="not in the tree")
    ranks.legend(fontsize=8, frameon=False)
    ranks.set_ylim(0, 1.08 * max(1, counts.sum(axis=1).max()))  # margins may end at an empty bar
    ranks.set(xlabel="the draft's rank of the target's token", ylabel="tokens")
    numbers = table["reason"].value_counts().reindex(list(REASONS)).dropna()
    labels = [reason.replace(" that the ", "\nthat the ") for reason in numbers.index]
    bars = reasons.barh(labels, numbers, color=[_BLUE, _RED, _RED, _RED][: len(numbers)])
    if REASONS[0] not in numbers:
        bars[0].set_color(_RED)
    texts = [f"{count:.0f} ({100 * count / len(table):.0f} %)" for count in numbers]
    reasons.bar_label(bars, texts, fontsize=8, padding=3)
    reasons.margins(x=0.25)
    reasons.invert_yaxis()
    reasons.set(xlabel="tokens", title="what became of the target's token")
    for ax in target:
        ax.bar(target_bins.index.astype(str), target_bins, color=_RED)
        mean = _rejected(table)["top_target_prob"].astype(float).mean()
        label = "the target's rank of the draft's first choice"
        ax.set(xlabel=label, ylabel="rejections", title=f"mean probability {mean:.2f}")
    for ax in (ranks, reasons, *target):
        ax.spines[["top", "right"]].set_visible(False)
        ax.tick_params(labelsize=8)
    text = title or "Why draft tokens were rejected"
    figure.suptitle(text, fontsize=9, x=0.01, ha="left", parse_math=False)
    stream = BytesIO()
    figure.savefig(stream, format="png")
    return stream.getvalue()
