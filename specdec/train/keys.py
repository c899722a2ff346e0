"""Calls a function or class with plain configuration values, after checking their keys."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from specdec.errors import UserError

T = TypeVar("T")


def check_keys(
    function: Callable[..., object],
    values: Mapping[str, Any],
    *,
    where: str = "",
    injected: Collection[str] = (),
) -> None:
    """Compares configuration keys with the parameters of a function or class.

    Args:
        function: the function or class.
        values: the configuration.
        where: prefix of the error message, such as "plan: ".
        injected: parameters that do not come from the configuration.

    Raises:
        UserError: a key is unknown, or one without a default is missing.
    """
    parameters = inspect.signature(function).parameters
    known = [name for name in parameters if name not in injected]
    for key in values:
        if key not in known:
            near = get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
            raise UserError(f"{where}unknown key {key!r}: {hint}")
    required = [name for name in known if parameters[name].default is inspect.Parameter.empty]
    missing = [name for name in required if name not in values]
    if missing:
        raise UserError(f"{where}missing keys: {', '.join(missing)}")


def build(make: Callable[..., T], values: Mapping[str, Any], where: str, **injected: Any) -> T:
    """Returns ``make(**values, **injected)`` after ``check_keys``."""
    check_keys(make, values, where=f"{where}: ", injected=tuple(injected))
    return make(**values, **injected)
