"""Many requests at a time: scheduling, arrivals, prefill and paged admission (SpecPipe-DB)."""

from specdec.serving.arrivals import arrival_times
from specdec.serving.blocks import BlockBudget
from specdec.serving.feeding import Feeding, Turns
from specdec.serving.rules import ServingRules

__all__ = ["BlockBudget", "Feeding", "ServingRules", "Turns", "arrival_times"]
