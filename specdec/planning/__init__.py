"""Which method, sizes and layout, for given models on given machines: ``specdec plan``."""

from __future__ import annotations

from specdec.planning.answer import Choice, Plan
from specdec.planning.checking import Verdict, check_run, units_of_run
from specdec.planning.job import plan
from specdec.planning.options import PlanOptions

__all__ = ["Choice", "Plan", "PlanOptions", "Verdict", "check_run", "plan", "units_of_run"]
