"""Builds the clock that ``clock=`` names: a built-in kind, or a class outside this library."""

from collections.abc import Mapping
from typing import Any

from specdec.clocks.interface import CONTROLLER, Clock, ClockKind, Timeline
from specdec.clocks.meter import Meter
from specdec.clocks.profile import CostCurve, LatencyProfile
from specdec.clocks.simulated import SimulatedClock
from specdec.clocks.wall import MeasuredClock, PacedClock
from specdec.errors import UserError
from specdec.parts.build import build_part, locate

_DERIVED = ("kind", "caveat")
"""Keys that ``config.job`` adds to the node of a clock class outside this library."""


def build_clock(
    node: Mapping[str, Any],
    meter: Meter,
    *,
    rank: int = CONTROLLER,
    timeline: Timeline | None = None,
) -> Clock:
    """Builds the clock of one process from the resolved configuration node ``clock``, which
    contains the costs of the latency profile.

    ``_target_`` names a class outside this library, whose constructor may also take ``meter``,
    ``rank`` and ``timeline``.
    """
    if "_target_" in node:
        runtime = {"meter": lambda: meter, "rank": lambda: rank, "timeline": lambda: timeline}
        keys = {key: value for key, value in node.items() if key not in _DERIVED}
        clock: Clock = build_part(keys, runtime, "clock", Clock)
        return clock
    kind = ClockKind(node["kind"])
    if kind is ClockKind.MEASURED:
        return MeasuredClock(meter=meter, rank=rank, timeline=timeline)
    profile, scale = build_profile(node), float(node["scale"])
    if kind is ClockKind.SIMULATED:
        return SimulatedClock(profile, scale=scale, timeline=timeline)
    return PacedClock(profile, scale=scale, meter=meter, rank=rank, timeline=timeline)


def clock_kind(node: Mapping[str, Any]) -> ClockKind:
    if "_target_" not in node:
        return ClockKind(node["kind"])
    kind = getattr(locate(node["_target_"], "clock"), "kind", None)
    if kind not in list(ClockKind):
        raise UserError(
            f"clock._target_={node['_target_']} has kind={kind!r}: set the class attribute kind to"
            f" one of {', '.join(f'ClockKind.{k.name}' for k in ClockKind)}"
        )
    return ClockKind(kind)


def check_in_process(kind: ClockKind, *, tracing: bool) -> None:
    """Raises ``UserError`` for clocks and traces that need one process per stage: stages that share
    a process take turns, so measured and paced times would mean nothing.
    """
    remedy = "add executor.transport=distributed, or use clock=simulated or executor=local"
    if kind is ClockKind.PACED:
        raise UserError(f"clock=paced needs a process per stage: {remedy}")
    if kind is ClockKind.MEASURED and tracing:
        raise UserError(f"trace=true with clock=measured needs a process per stage: {remedy}")


def build_profile(node: Mapping[str, Any]) -> LatencyProfile:
    costs = {kind: CostCurve.of(curve) for kind, curve in node["costs"].items()}
    return LatencyProfile(name=node["profile"], costs=costs, note=node.get("note", ""))
