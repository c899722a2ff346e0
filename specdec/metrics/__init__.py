"""Metrics: raw counts (``results``), rates (``rates``), ratios to ``ar`` (``compare``)."""

from specdec.clocks.meter import Meter
from specdec.metrics.compare import comparison_row, prompt_speedups, speed_ratio_interval
from specdec.metrics.loops import loop_share
from specdec.metrics.parity import Divergence, Parity, lossless_against
from specdec.metrics.rates import summarise
from specdec.metrics.results import RequestResult, Run, RunTotals

__all__ = [
    "Divergence",
    "Meter",
    "Parity",
    "RequestResult",
    "Run",
    "RunTotals",
    "comparison_row",
    "loop_share",
    "lossless_against",
    "prompt_speedups",
    "speed_ratio_interval",
    "summarise",
]
