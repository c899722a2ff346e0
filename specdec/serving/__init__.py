"""Serves many requests: arrivals, admission to a paged cache, prefill, scheduling (SpecPipe-DB)."""

from typing import TYPE_CHECKING

from specdec.lazy import lazy_exports

if TYPE_CHECKING:
    from specdec.serving.arrivals import arrival_times
    from specdec.serving.blocks import BlockBudget
    from specdec.serving.feeding import Feeding, Turns
    from specdec.serving.rules import ServingRules

__getattr__, __dir__ = lazy_exports(__name__)
