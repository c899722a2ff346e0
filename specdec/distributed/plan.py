"""What a session is: which rank does which part of the target, with what, for whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """One rank's part.

    Attributes:
        layers: (first, last) layer of the target.
        group: its stage, from 1; a stage may be a group of ranks that work one after the other
            within a step (PipeDec's G).
        last_in_group: whether its rows wait for the step's commit before they go on.
        peers: ranks that share its layers (tensor parallelism), itself among them; empty where it
            has them alone.
        exits: layers of the target before each early exit that it hands out; it alone has the
            heads.
        hidden: layers, from 0, whose output it sends to rank 0.
    """

    layers: tuple[int, int]
    group: int
    last_in_group: bool
    peers: tuple[int, ...] = ()
    exits: tuple[int, ...] = ()
    hidden: tuple[int, ...] = ()

    @property
    def tells(self) -> bool:
        """Whether it sends rank 0 something besides answers."""
        return bool(self.exits or self.hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitPlan:
    """What ranks with early exits hand out (``Output.exits``).

    Attributes:
        candidates: tokens per node and exit at most.
        sample: whether they are sampled, and come with their whole distribution.
    """

    candidates: int
    sample: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionPlan:
    """What rank 0 tells the others when a session begins; crosses as JSON.

    Attributes:
        ranks: parts of ranks 1 .. N.
        degree: ranks that share each layer; a rank's rows come from the rank so many before it.
        num_ranks: all that the run needs besides rank 0: N, and those of the draft alone.
        model: the ``model`` section of a resolved configuration.
        clock: the ``clock`` section.
        seed: keys the target's draws.
        needs_probs: whether answers carry distributions.
        threads: of torch, per rank; None for what the rank has.
        trace: whether ranks write down what they do.
        num_blocks, block_tokens: of each rank's paged cache; ``num_blocks`` None: not paged.
        exits: None without early exits.
    """

    ranks: tuple[RankPlan, ...]
    model: Mapping[str, Any]
    clock: Mapping[str, Any]
    seed: int
    needs_probs: bool
    threads: int | None = None
    trace: bool = False
    degree: int = 1
    num_ranks: int = 0
    num_blocks: int | None = None
    block_tokens: int = 16
    exits: ExitPlan | None = None

    @property
    def members(self) -> range:
        """The ranks that have a part in it."""
        return range(1, len(self.ranks) + 1)

    @property
    def num_groups(self) -> int:
        """Stages, which is the pipeline's latency."""
        return self.ranks[-1].group

    @property
    def devices(self) -> list[int]:
        """Per stage, ranges of layers that work one after the other."""
        sizes = [0] * self.num_groups
        for part in self.ranks[:: self.degree]:
            sizes[part.group - 1] += 1
        return sizes

    @property
    def repliers(self) -> set[int]:
        """Ranks that send something to rank 0 within a step."""
        return {i for i, part in enumerate(self.ranks, 1) if part.tells} | {len(self.ranks)}

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
                peers=tuple(r["peers"]),
                exits=tuple(r["exits"]),
                hidden=tuple(r["hidden"]),
            )
            for r in values["ranks"]
        )
        exits = ExitPlan(**values["exits"]) if values["exits"] else None
        return SessionPlan(**{**values, "ranks": ranks, "exits": exits})


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPlan:
    """What rank 0 tells the ranks that share the draft with it; crosses as JSON.

    Attributes:
        peers: rank 0, then the others.
        model, clock, threads, trace: as ``SessionPlan``.
    """

    peers: tuple[int, ...]
    model: Mapping[str, Any]
    clock: Mapping[str, Any]
    threads: int | None = None
    trace: bool = False

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that have a part in it, rank 0 apart."""
        return self.peers[1:]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> DraftPlan:
        """What ``to_json`` gave."""
        return DraftPlan(**{**values, "peers": tuple(values["peers"])})


def plan_ranks(
    bounds: Sequence[tuple[int, int]],
    groups: Sequence[int] | None,
    degree: int = 1,
    *,
    exits: Sequence[int] = (),
    hidden: Sequence[int] = (),
) -> tuple[RankPlan, ...]:
    """Ranks for layer ranges.

    Args:
        bounds: (first, last) layer of each range.
        groups: ranges per stage (None: one each).
        degree: ranks per range, which share its layers; the last of them tells rank 0 of them.
        exits: layers before each early exit.
        hidden: layers, from 0, whose output rank 0 needs.
    """
    sizes = [1] * len(bounds) if groups is None else groups
    places = [(g + 1, i == size - 1) for g, size in enumerate(sizes) for i in range(size)]
    plans: list[RankPlan] = []
    for layers, (group, last) in zip(bounds, places, strict=True):
        first = len(plans) + 1
        peers = tuple(range(first, first + degree)) if degree > 1 else ()
        part = RankPlan(layers=layers, group=group, last_in_group=last, peers=peers)
        telling = replace(
            part,
            exits=tuple(layer for layer in exits if layers[0] < layer <= layers[1]),
            hidden=tuple(layer for layer in hidden if layers[0] <= layer < layers[1]),
        )
        plans += [*[part] * (degree - 1), telling]
    return tuple(plans)
