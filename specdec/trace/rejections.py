"""Counts why draft tokens were rejected in a trace, and plots the counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

from specdec.trace.judgements import Judgement

if TYPE_CHECKING:
    from matplotlib.axes import Axes

IN_TREE = "accepted: in the tree"
REASONS = (
    IN_TREE,
    "a candidate of the draft that the tree had no room for",
    "not among the draft's candidates",
    "the draft had not proposed anything there",
)
"""Whether the target's token was accepted, and why not."""

RANKS = ("1", "2", "3-4", "5-8", "9-16", "17-32", "33+", "none")
"""Bins of the draft's rank of the target's token; none: the token was not a candidate."""

TARGET_RANKS = ("1", "2", "3-4", "5-8", "9-16", "17-32", "33+")
_BLUE, _PALE, _RED = "#0070a8", "#b9d6e8", "#b00020"
_DPI = 150


@dataclass(frozen=True, slots=True)
class Rejections:
    """Counts over the decided tokens of a trace.

    The draft's *first choice* is its most probable candidate. The means cover rejections where the
    draft had candidates; values of the target need a run that computes its distribution.
    """

    reasons: Mapping[str, int]  # one of ``REASONS`` -> tokens
    ranks: Mapping[str, tuple[int, int]]  # one of ``RANKS`` -> (tokens in the tree, others)
    target_ranks: Mapping[str, int]  # the target's ranks of rejected first choices; may be empty
    target_prob: float | None  # mean target probability of the first choice
    draft_prob: float | None  # mean draft probability of the first choice

    def figures(self) -> dict[str, float]:
        """Returns shares and means by name, for loggers."""
        total = sum(self.reasons.values())
        names = ("accepted", "no_room", "not_a_candidate", "no_proposal")
        shares = {
            f"share_{name}": self.reasons[reason] / total
            for name, reason in zip(names, REASONS, strict=True)
        }
        means = {
            "target_prob_of_rejected": self.target_prob,
            "draft_prob_of_rejected": self.draft_prob,
        }
        return shares | {name: value for name, value in means.items() if value is not None}


def rejections(trees: Mapping[str, Any]) -> Rejections | None:
    """Counts the tokens of a ``trees.json``; None if none is judged (files of earlier versions)."""
    reasons, hits, misses, target_ranks = (Counter[str]() for _ in range(4))
    probs: list[tuple[float | None, float]] = []
    for found in _judgements(trees):
        reasons[_reason(found)] += 1
        if not found.candidates:
            continue
        (hits if found.in_tree else misses)[_bin(found.rank)] += 1
        if not found.in_tree and found.top_prob is not None:
            probs.append((found.top_target_prob, found.top_prob))
            if found.top_target_rank is not None:
                target_ranks[_bin(found.top_target_rank)] += 1
    if not reasons:
        return None
    known = [prob for prob, _ in probs if prob is not None]
    return Rejections(
        reasons={reason: reasons[reason] for reason in REASONS},
        ranks={name: (hits[name], misses[name]) for name in RANKS},
        target_ranks={name: target_ranks[name] for name in TARGET_RANKS} if target_ranks else {},
        target_prob=sum(known) / len(known) if known else None,
        draft_prob=sum(prob for _, prob in probs) / len(probs) if probs else None,
    )


def _judgements(trees: Mapping[str, Any]) -> Iterator[Judgement]:
    names = tuple(Judgement.__dataclass_fields__)
    for request in trees["requests"]:
        for step in request["steps"]:
            for row in (step["commit"] or {}).get("judged", ()):
                yield Judgement(**dict(zip(names, row, strict=True)))


def _reason(found: Judgement) -> str:
    if found.in_tree:
        return REASONS[0]
    if not found.candidates:
        return REASONS[3]
    return REASONS[1] if found.rank else REASONS[2]


def _bin(rank: int) -> str:
    if rank == 0:
        return RANKS[-1]
    for name in TARGET_RANKS[:-1]:
        if rank <= int(name.rpartition("-")[2]):
            return name
    return TARGET_RANKS[-1]


def rejections_png(found: Rejections, *, title: str = "") -> bytes:
    """Plots the draft's ranks of the target's tokens, the reasons, and any known target ranks."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13.0, 3.6), dpi=_DPI, layout="constrained")
    panels = figure.subplots(1, 3 if found.target_ranks else 2)
    _ranks_panel(panels[0], found)
    _reasons_panel(panels[1], found)
    if found.target_ranks:
        panels[2].bar(list(found.target_ranks), list(found.target_ranks.values()), color=_RED)
        label = "the target's rank of the draft's first choice"
        _finish(panels[2], label, "rejections", f"mean probability {found.target_prob:.2f}")
    figure.suptitle(title or "Why draft tokens were rejected", fontsize=10, x=0.01, ha="left")
    stream = BytesIO()
    figure.savefig(stream, format="png")
    return stream.getvalue()


def _ranks_panel(ax: Axes, found: Rejections) -> None:
    inside, outside = ([counts[i] for counts in found.ranks.values()] for i in (0, 1))
    ax.bar(list(found.ranks), inside, color=_BLUE, label="in the tree: accepted")
    ax.bar(list(found.ranks), outside, bottom=inside, color=_PALE, label="not in the tree")
    ax.legend(fontsize=8, frameon=False)
    tallest = max(map(sum, found.ranks.values()))
    ax.set_ylim(0, 1.08 * max(1, tallest))  # margins would end at a bar of no height
    _finish(ax, "the draft's rank of the target's token", "tokens", "")


def _reasons_panel(ax: Axes, found: Rejections) -> None:
    total = sum(found.reasons.values())
    names = {reason: count for reason, count in found.reasons.items() if count}
    labels = [reason.replace(" that the ", "\nthat the ") for reason in names]
    ax.barh(labels, list(names.values()), color=[_BLUE if n == IN_TREE else _RED for n in names])
    for y, count in enumerate(names.values()):
        text = f"{count} ({100 * count / total:.0f} %)"
        ax.annotate(text, (count, y), (3, 0), textcoords="offset points", va="center", fontsize=8)
    ax.margins(x=0.25)
    ax.invert_yaxis()
    _finish(ax, "tokens", "", "what became of the target's token")


def _finish(ax: Axes, x: str, y: str, title: str) -> None:
    ax.set_xlabel(x, fontsize=8.5)
    ax.set_ylabel(y, fontsize=8.5)
    ax.set_title(title, fontsize=9)
    ax.tick_params(labelsize=8)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
