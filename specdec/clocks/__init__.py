"""Time: one interface for measured, paced and simulated clocks."""

from specdec.clocks.interface import CONTROLLER, Clock, ClockKind, WallClock
from specdec.clocks.profile import CostCurve, LatencyProfile, Work
from specdec.clocks.simulated import SimulatedClock
from specdec.clocks.timeline import ClockReport, DraftTime, Span, Timeline
from specdec.clocks.wall import MeasuredClock, PacedClock

__all__ = [
    "CONTROLLER",
    "Clock",
    "ClockKind",
    "ClockReport",
    "CostCurve",
    "DraftTime",
    "LatencyProfile",
    "MeasuredClock",
    "PacedClock",
    "SimulatedClock",
    "Span",
    "Timeline",
    "WallClock",
    "Work",
]
