"""How much of the draft's work passes while the target is at work."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class DraftTime:
    """Draft work of the controller, on a clock that knows when the target's ranks are done.

    Attributes:
        total_s: seconds of it.
        hidden_s: those of them in which a rank of the target was at work.
    """

    total_s: float = 0.0
    hidden_s: float = 0.0

    def add(self, *, began_s: float, seconds: float, target_done_s: float) -> None:
        """Counts one piece of draft work; times are on one clock."""
        self.total_s += seconds
        self.hidden_s += min(max(target_done_s - began_s, 0.0), seconds)
