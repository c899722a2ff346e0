"""All objects that an object holds, directly or through others."""

import gc
from types import FunctionType, ModuleType


def reachable(root: object) -> list[object]:
    """Those that it reaches, except through classes, modules and functions."""
    found, pending = dict[int, object](), [root]
    while pending:
        one = pending.pop()
        if id(one) not in found and not isinstance(one, type | ModuleType | FunctionType):
            found[id(one)] = one
            pending += gc.get_referents(one)
    return [*found.values()]
