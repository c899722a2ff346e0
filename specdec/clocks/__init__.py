"""Clocks: measured (wall time), paced (wall time stretched to a profile) and simulated time."""

from typing import TYPE_CHECKING

from specdec.lazy import lazy_exports

if TYPE_CHECKING:
    from specdec.clocks.interface import (
        CONTROLLER,
        Clock,
        ClockKind,
        ClockReport,
        DraftTime,
        Span,
        Timeline,
        WallClock,
    )
    from specdec.clocks.profile import CostCurve, LatencyProfile, Work
    from specdec.clocks.simulated import SimulatedClock
    from specdec.clocks.wall import MeasuredClock, PacedClock

__getattr__, __dir__ = lazy_exports(__name__)
