"""Dataclasses of which every step makes several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as record
else:

    def record(*, frozen: bool, **options: Any) -> Callable[[type], type]:
        """``dataclass(frozen=True, ...)`` to type checkers, which refuse assignments to fields.

        At run time the fields can be assigned: a frozen dataclass takes two to three times as
        long to make, and parts exchange about ten of them per step.
        """
        assert frozen, "for records that can change use dataclass"
        return dataclass(**options)


__all__ = ["record"]
