"""``specdec plan`` chooses strategy, tree sizes and device layout for given models and machines."""

from typing import TYPE_CHECKING

from specdec.lazy import lazy_exports

if TYPE_CHECKING:
    from specdec.planning.answer import Plan, PlanVerdict, Recommendation, check_run, units_of_run
    from specdec.planning.job import plan
    from specdec.planning.options import PlanOptions

__getattr__, __dir__ = lazy_exports(__name__)
