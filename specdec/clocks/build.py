"""."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec.clocks import (
    CONTROLLER,
    Clock,
    ClockKind,
    CostCurve,
    LatencyProfile,
    MeasuredClock,
    PacedClock,
    SimulatedClock,
    Timeline,
)
from specdec.clocks.meter import Meter


def build_clock(
    node: Mapping[str, Any],
    meter: Meter,
    *,
    rank: int = CONTROLLER,
    timeline: Timeline | None = None,
) -> Clock:
    """Builds one process's clock from ``clock=``.

    Args:
        node: resolved, with the profile's costs.
        meter: the process's meter, which a wall clock tells of its waits.
        rank: the rank that this process is.
        timeline: gets the work of a traced run.
    """
    kind = ClockKind(node["kind"])
    if kind is ClockKind.MEASURED:
        return MeasuredClock(meter=meter, rank=rank, timeline=timeline)
    profile, scale = build_profile(node), float(node["scale"])
    if kind is ClockKind.SIMULATED:
        return SimulatedClock(profile, scale=scale, timeline=timeline)
    return PacedClock(profile, scale=scale, meter=meter, rank=rank, timeline=timeline)


def build_profile(node: Mapping[str, Any]) -> LatencyProfile:
    """The latency profile of a clock's node: its ``profile`` (a name), ``costs`` and ``note``."""
    costs = {
        kind: CostCurve(
            tokens=tuple(curve["tokens"]),
            ms=tuple(curve["ms"]),
            block_tokens=curve.get("block_tokens", 0),
            block_ms=curve.get("block_ms", 0.0),
        )
        for kind, curve in node["costs"].items()
    }
    return LatencyProfile(name=node["profile"], costs=costs, note=node.get("note", ""))
