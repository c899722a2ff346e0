from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a model runs: ``stages`` pipeline stages, each split over ``degree`` devices.

    ``ranks`` are the clock ranks of the devices in layer order; 0 is the controller. If ranks are
    processes, these are the process ranks. ``weight_bytes`` has the bytes on each device.
    """

    ranks: tuple[int, ...]
    weight_bytes: tuple[int, ...]
    stages: int = 1
    degree: int = 1


@dataclass(frozen=True, kw_only=True)
class ExecutorPlan:
    """Properties of an executor before it is built; executor classes may add fields.

    ``placements`` maps a model name ("target", "draft", ...) to where it runs.
    """

    latency: int | None
    in_flight: int
    placements: Mapping[str, Placement]

    @property
    def num_ranks(self) -> int:
        """Number of ranks, not counting the controller."""
        return max(rank for place in self.placements.values() for rank in place.ranks)

    @property
    def device_bytes(self) -> dict[int, int]:
        """Maps each rank to the bytes of all weights on it."""
        total: dict[int, int] = {}
        for place in self.placements.values():
            for rank, size in zip(place.ranks, place.weight_bytes, strict=True):
                total[rank] = total.get(rank, 0) + size
        return dict(sorted(total.items()))
