"""Reads acceptance logs and fits acceptance models: how often a target accepts draft tokens."""

from typing import TYPE_CHECKING

from specdec.lazy import lazy_exports

if TYPE_CHECKING:
    from specdec.fitting.fit import FittedModel, fit_logs
    from specdec.fitting.logs import FORMATS, ReadOptions, read_log
    from specdec.fitting.model import AcceptanceModel, tail_of
    from specdec.fitting.requests import AcceptanceLog, RequestLog

__getattr__, __dir__ = lazy_exports(__name__)
