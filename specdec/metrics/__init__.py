"""Metrics: raw counts (``results``), rates (``rates``), ratios to ``ar`` (``compare``)."""

from specdec.clocks.meter import Meter
from specdec.metrics.compare import comparison_row, speed_ratio_interval
from specdec.metrics.loops import loop_share
from specdec.metrics.parity import lossless_against
from specdec.metrics.rates import summarise
from specdec.metrics.results import RequestResult, Run, RunTotals

__all__ = [
    "Meter",
    "RequestResult",
    "Run",
    "RunTotals",
    "comparison_row",
    "loop_share",
    "lossless_against",
    "speed_ratio_interval",
    "summarise",
]
