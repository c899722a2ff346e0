"""Where a target may exit early, for sources that read several exits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specdec.errors import UserError
from specdec.executors.early_exit import ExitFront


@dataclass(frozen=True, slots=True)
class ExitPlaces:
    """Where a target may exit, for sources that use several exits (PPSD B.3).

    Attributes:
        first: layers before the model's own exit.
        num_layers: of the target.
        build: makes the front up to exits; None where stages compute them.
    """

    first: int
    num_layers: int
    build: Callable[[Sequence[int]], ExitFront] | None = None

    def layers(self, further: Sequence[int] | None) -> tuple[int, ...]:
        """Layers before each exit, the model's own first.

        Args:
            further: layers before the others; None for one at twice the depth of the first, or as
                near to it as the target is deep.

        Raises:
            UserError: they do not rise, or are not inside the target.
        """
        first, last = self.first, self.num_layers - 1
        found = [min(2 * first, last)] if further is None else list(further)
        places = [first, *found]
        if not found or places != sorted(set(places)) or places[-1] > last:
            raise UserError(
                f"source.further_exits={further} must rise from above model.exit_layer={first} to"
                f" at most {last}, the target's layers less one; for one exit use source=early_exit"
            )
        return tuple(places)
