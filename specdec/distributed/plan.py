"""What a session is: which rank does which part of the target, with what, for whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """One rank's part.

    Attributes:
        layers: (first, last) layer of the target.
        group: its stage, from 1; a stage may be a group of ranks that work one after the other
            within a step (PipeDec's G).
        last_in_group: whether its rows wait for the step's commit before they go on.
    """

    layers: tuple[int, int]
    group: int
    last_in_group: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionPlan:
    """What rank 0 tells the others when a session begins; crosses as JSON.

    Attributes:
        ranks: parts of ranks 1 .. N.
        model: the ``model`` section of a resolved configuration.
        clock: the ``clock`` section.
        seed: keys the target's draws.
        needs_probs: whether answers carry distributions.
        threads: of torch, per rank; None for what the rank has.
        trace: whether ranks write down what they do.
    """

    ranks: tuple[RankPlan, ...]
    model: Mapping[str, Any]
    clock: Mapping[str, Any]
    seed: int
    needs_probs: bool
    threads: int | None = None
    trace: bool = False

    @property
    def num_groups(self) -> int:
        """Stages, which is the pipeline's latency."""
        return self.ranks[-1].group

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> SessionPlan:
        """What ``to_json`` gave."""
        ranks = tuple(
            RankPlan(
                layers=(r["layers"][0], r["layers"][1]),
                group=r["group"],
                last_in_group=r["last_in_group"],
            )
            for r in values["ranks"]
        )
        return SessionPlan(**{**values, "ranks": ranks})


def plan_ranks(
    bounds: Sequence[tuple[int, int]], groups: Sequence[int] | None
) -> tuple[RankPlan, ...]:
    """Ranks for layer ranges, one per rank; ``groups``: ranks per stage (None: one each)."""
    sizes = [1] * len(bounds) if groups is None else groups
    members = [(g + 1, i == size - 1) for g, size in enumerate(sizes) for i in range(size)]
    return tuple(
        RankPlan(layers=layers, group=group, last_in_group=last)
        for layers, (group, last) in zip(bounds, members, strict=True)
    )
