"""Latency profiles: for each kind of work, a curve of cost over the number of tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from typing import Annotated, Any

from pydantic import Field

from specdec.parts.fields import Index, validated

_Ms = Annotated[float, Field(ge=0)]


class Work(StrEnum):
    """Kinds of work that have a cost in a latency profile.

    ``STAGE``: a pass of one stage. ``DRAFT``, ``MIDDLE``: a pass of that draft model. ``HEAD``: the
    output head. ``EXIT``: an exit head. ``PRUNE``: dropping nodes. ``TRANSFER``: sending rows.
    """

    STAGE = "stage"
    DRAFT = "draft"
    MIDDLE = "middle"
    HEAD = "head"
    PRUNE = "prune"
    TRANSFER = "transfer"
    EXIT = "exit"


@validated
@dataclass(frozen=True, slots=True, kw_only=True)
class CostCurve:
    """Cost in milliseconds as a function of the number of tokens, linear between the given points.

    Attributes:
        tokens, ms: the points: increasing numbers of tokens, and the cost in ms at each of them.
        block_tokens, block_ms: beyond the last point, each further block of ``block_tokens``,
            partial or full, costs ``block_ms``. With 0 the last segment's slope is extended.
        devices: factor of the cost on each device of the pipeline (ranks 1, 2, ...), at most 1,
            since the curve is that of the slowest device; (): all devices are equal.
    """

    tokens: tuple[Index, ...]
    ms: tuple[_Ms, ...]
    block_tokens: Index = 0
    block_ms: _Ms = 0.0
    devices: tuple[Annotated[float, Field(gt=0, le=1)], ...] = ()

    def __post_init__(self) -> None:
        ordered = all(a < b for a, b in zip(self.tokens, self.tokens[1:], strict=False))
        if len(self.tokens) != len(self.ms) or not self.tokens or not ordered:
            raise ValueError(
                f"cost curve needs increasing tokens with one ms each, got {self.tokens} and"
                f" {self.ms}"
            )

    @staticmethod
    def of(curve: Mapping[str, Any]) -> CostCurve:
        keys: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in curve.items()}
        return CostCurve(**keys)

    def __call__(self, num_tokens: int) -> float:
        if num_tokens <= 0:
            return 0.0
        last = self.tokens[-1]
        if num_tokens > last and self.block_tokens:
            return self.ms[-1] + self.block_ms * -(-(num_tokens - last) // self.block_tokens)
        if num_tokens <= self.tokens[0] or len(self.tokens) == 1:
            return self.ms[0]
        i = min(bisect_left(self.tokens, num_tokens), len(self.tokens) - 1)
        left, right = self.tokens[i - 1], last if i == len(self.tokens) - 1 else self.tokens[i]
        part = (num_tokens - left) / (right - left)
        return self.ms[i - 1] + part * (self.ms[i] - self.ms[i - 1])


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyProfile:
    """Costs of work, the times it takes on a testbed; kinds of work without a curve cost 0."""

    name: str
    costs: Mapping[str, CostCurve] = field(default_factory=dict)
    note: str = ""

    def ms(self, kind: Work, num_tokens: int, rank: int = 0) -> float:
        """Returns the cost in ms on the pipeline's device ``rank``; rank 0: the slowest device."""
        curve = self.costs.get(kind.value)
        if curve is None:
            return 0.0
        return curve(num_tokens) * (curve.devices[rank - 1] if rank and curve.devices else 1.0)


class Prices:
    def __init__(self, profile: LatencyProfile, scale: float) -> None:
        self.seconds = cache(lambda *work: profile.ms(*work) * 1e-3 * scale)


def curve_at(curves: Mapping[Any, Mapping[str, Any]], degree: int) -> dict[str, Any]:
    """Returns the cost curve for a degree of parallelism, interpolated between the two nearest
    degrees in ``curves`` (degree -> curve, all with the same ``tokens``).
    """
    by_degree = {int(number): curve for number, curve in curves.items()}
    if degree in by_degree:
        return dict(by_degree[degree])
    low = max(number for number in by_degree if number < degree)
    high = min(number for number in by_degree if number > degree)
    share = (degree - low) / (high - low)
    left, right = by_degree[low], by_degree[high]

    def between(a: float, b: float) -> float:
        return a + share * (b - a)

    curve = dict(left)
    curve["ms"] = [between(a, b) for a, b in zip(left["ms"], right["ms"], strict=True)]
    if "block_ms" in left:
        curve["block_ms"] = between(left["block_ms"], right.get("block_ms", 0.0))
    return curve
