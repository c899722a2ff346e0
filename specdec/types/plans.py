from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a model runs.

    Attributes:
        ranks: clock ranks of the model's devices, in the order of its layers; 0 is the controller.
            If ranks are processes, these are the process ranks.
        weight_bytes: bytes of weights on each device.
        stages: number of pipeline stages.
        degree: number of devices that share every layer (tensor parallelism).
    """

    ranks: tuple[int, ...]
    weight_bytes: tuple[int, ...]
    stages: int = 1
    degree: int = 1


@dataclass(frozen=True, kw_only=True)
class ExecutorPlan:
    """Properties of an executor before it is built; executor classes may add fields.

    Attributes:
        latency, in_flight: see ``Executor``.
        placements: model name ("target", "draft", ...) -> where it runs.
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
        """Returns rank -> bytes of the weights of all models on that rank."""
        total: dict[int, int] = {}
        for place in self.placements.values():
            for rank, size in zip(place.ranks, place.weight_bytes, strict=True):
                total[rank] = total.get(rank, 0) + size
        return dict(sorted(total.items()))
