"""Records traces of a run: a timeline of all ranks and the growth of the token trees."""

from typing import TYPE_CHECKING

from specdec.lazy import lazy_exports

if TYPE_CHECKING:
    from specdec.trace.files import write_trace
    from specdec.trace.recorder import MAX_STEPS, ObservedExecutor, RunTrace

__getattr__, __dir__ = lazy_exports(__name__)
