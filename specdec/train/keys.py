"""Plain values of a configuration as arguments: unknown and missing keys are told by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from specdec.errors import UserError

T = TypeVar("T")
_NONE = inspect.Parameter.empty


def check_keys(
    call: Callable[..., object],
    values: Mapping[str, Any],
    *,
    where: str = "",
    given: Collection[str] = (),
) -> None:
    """Compares keys with the arguments of what they are meant for.

    Args:
        call: a function or class.
        values: the configuration.
        where: the configuration's place, for the message.
        given: arguments that do not come from the configuration.

    Raises:
        UserError: a key is unknown (with the nearest known one), or one without default missing.
    """
    parameters = inspect.signature(call).parameters
    known = [name for name in parameters if name not in given]
    for key in values:
        if key not in known:
            near = get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
            raise UserError(f"{where}unknown key {key!r}: {hint}")
    missing = [n for n in known if n not in values and parameters[n].default is _NONE]
    if missing:
        raise UserError(f"{where}missing keys: {', '.join(missing)}")


def made_of(make: Callable[..., T], values: Mapping[str, Any], where: str, **given: Any) -> T:
    """``make(**values, **given)`` after ``check_keys``."""
    check_keys(make, values, where=f"{where}: ", given=tuple(given))
    return make(**values, **given)
