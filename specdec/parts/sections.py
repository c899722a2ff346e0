"""Calls a function or class with the values of a configuration section, after checking them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from specdec.errors import UserError
from specdec.parts.build import check_keys
from specdec.parts.fields import names_of, signature_of

_T = TypeVar("_T")


def check_values(
    make: Callable[..., Any],
    values: Mapping[str, Any],
    where: str = "",
    *,
    given: Collection[str] = (),
    also: Collection[str] = (),
) -> None:
    """Checks a section of a configuration against the parameters of a function or class.

    Args:
        where: dotted key of the section, for messages.
        given: parameters that the section does not state.
        also: further keys that the configuration may state; they are checked elsewhere.

    Raises:
        UserError: a key is unknown or missing, or a value has the wrong type or is out of range.
    """
    model = signature_of(make).model
    names = (*names_of(model), *also)
    check_keys(model, values, where and f"{where}.", where or "the configuration", names=names)
    missing = [k for k in names_of(model, required=True) if k not in {*values, *given}]
    if missing:
        raise UserError(f"{where and where + ': '}missing keys: {', '.join(missing)}")


def build(make: Callable[..., _T], values: Mapping[str, Any], where: str = "", **given: Any) -> _T:
    """Returns ``make(**values, **given)`` after ``check_values``."""
    check_values(make, values, where, given=given)
    return make(**values, **given)
