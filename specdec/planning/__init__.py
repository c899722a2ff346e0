"""Which method, sizes and layout, for given models on given machines: ``specdec plan``."""

from __future__ import annotations

from specdec.planning.answer import Plan, Recommendation
from specdec.planning.checking import PlanVerdict, check_run, units_of_run
from specdec.planning.job import plan
from specdec.planning.options import PlanOptions

__all__ = [
    "Plan",
    "PlanOptions",
    "PlanVerdict",
    "Recommendation",
    "check_run",
    "plan",
    "units_of_run",
]
