"""Metrics: raw counts (``results``), rates (``rates``), ratios to ``ar`` (``compare``)."""

from typing import TYPE_CHECKING

from specdec.lazy import lazy_exports

if TYPE_CHECKING:
    from specdec.clocks.meter import Meter
    from specdec.metrics.compare import comparison_row, lossless_against, speed_ratio_interval
    from specdec.metrics.loops import loop_share
    from specdec.metrics.rates import summarise
    from specdec.metrics.results import RequestResult, Run, RunTotals

__getattr__, __dir__ = lazy_exports(__name__)
