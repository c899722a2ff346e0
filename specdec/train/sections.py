from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from specdec.parts.build import check_values

_T = TypeVar("_T")


def build(make: Callable[..., _T], values: Mapping[str, Any], where: str = "", **given: Any) -> _T:
    """Returns ``make(**values, **given)`` after ``check_values``."""
    check_values(make, values, where, given=given.keys())
    return make(**values, **given)
