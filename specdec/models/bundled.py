"""What ships with the package, by the names ``bundled:NAME`` of configurations."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from specdec.errors import UserError

PREFIX = "bundled:"

_ASSETS = Path(__file__).parents[1] / "assets"


def family_path(name: str) -> str:
    """The folder or file of the bundled family that ``bundled:NAME`` means; other names as given.

    Raises:
        UserError: nothing of that name ships.
    """
    if not name.startswith(PREFIX):
        return name
    family = _ASSETS / "tiny"
    found = family / name.removeprefix(PREFIX)
    if found == family or not found.exists():
        raise _absent(name, (part.name for part in family.iterdir() if part.is_dir()))
    return str(found)


def record_path(name: str) -> str:
    """The recorded run that ``bundled:NAME`` means; other names as given.

    Raises:
        UserError: nothing of that name ships.
    """
    if not name.startswith(PREFIX):
        return name
    found = _ASSETS / "records" / f"{name.removeprefix(PREFIX)}.npz"
    if not found.exists():
        raise _absent(name, (part.stem for part in found.parent.glob("*.npz")))
    return str(found)


def _absent(name: str, names: Iterable[str]) -> UserError:
    known = ", ".join(sorted(PREFIX + other for other in names))
    return UserError(f"{name!r} does not ship with specdec: give a path, or one of {known}")
