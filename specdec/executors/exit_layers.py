"""The layers after which a target may exit early, for sources that read several exits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specdec.errors import UserError
from specdec.executors.early_exit import ExitFront


@dataclass(frozen=True, slots=True)
class ExitPlaces:
    """The exits that a target allows (PPSD B.3).

    Attributes:
        first: number of layers before the model's own exit.
        num_layers: number of layers of the target.
        build: builds the front for exits after the given layers; None if pipeline stages compute
            the exits.
    """

    first: int
    num_layers: int
    build: Callable[[Sequence[int]], ExitFront] | None = None

    def layers(self, further: Sequence[int] | None) -> tuple[int, ...]:
        """Number of layers before each exit, the model's own exit first.

        Args:
            further: layers before the additional exits. Default: one exit at twice the depth of
                the first, or at the last layer but one.

        Raises:
            UserError: if they do not increase, or are not inside the target.
        """
        first, last = self.first, self.num_layers - 1
        additional = [min(2 * first, last)] if further is None else list(further)
        exits = [first, *additional]
        if not additional or exits != sorted(set(exits)) or exits[-1] > last:
            raise UserError(
                f"source.further_exits={further} must increase from above model.exit_layer={first}"
                f" to at most {last}, the target's layers less one; for one exit use"
                " source=early_exit"
            )
        return tuple(exits)
