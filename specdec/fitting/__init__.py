"""Laws of a draft's hits, fitted to measured acceptance; readers of acceptance logs."""

from __future__ import annotations

from specdec.fitting.fit import FittedLaw, fit_logs
from specdec.fitting.law import HitLaw
from specdec.fitting.logs import FORMATS, ReadOptions, read_log
from specdec.fitting.requests import AcceptanceLog, RequestLog
from specdec.fitting.tails import RankVector, fit_tail, tail_of

__all__ = [
    "FORMATS",
    "AcceptanceLog",
    "FittedLaw",
    "HitLaw",
    "RankVector",
    "ReadOptions",
    "RequestLog",
    "fit_logs",
    "fit_tail",
    "read_log",
    "tail_of",
]
