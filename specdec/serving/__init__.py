"""Many requests at once: who is fed, when prompts enter, what the cache admits (SpecPipe-DB)."""

from specdec.serving.arrivals import arrival_times
from specdec.serving.blocks import BlockBudget
from specdec.serving.feeding import Feeding, Turns
from specdec.serving.rules import ServingRules

__all__ = ["BlockBudget", "Feeding", "ServingRules", "Turns", "arrival_times"]
