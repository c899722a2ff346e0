"""Models and records that ship with the package, named ``bundled:NAME`` in configurations."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from specdec.errors import UserError

PREFIX = "bundled:"

_ASSETS = Path(__file__).parents[1] / "assets"


def family_path(name: str) -> str:
    """Returns the path of ``bundled:NAME`` in the bundled model family; other names unchanged.

    Raises:
        UserError: if it does not exist.
    """
    family = _ASSETS / "tiny"
    path = family / name.removeprefix(PREFIX)
    known = (part.name for part in family.iterdir() if part.is_dir())
    return _resolve(name, path, known) if name.startswith(PREFIX) else name


def record_path(name: str) -> str:
    """Returns the path of the recorded run ``bundled:NAME``; other names unchanged.

    Raises:
        UserError: if it does not exist.
    """
    path = _ASSETS / "records" / f"{name.removeprefix(PREFIX)}.npz"
    known = (part.stem for part in path.parent.glob("*.npz"))
    return _resolve(name, path, known) if name.startswith(PREFIX) else name


def _resolve(name: str, path: Path, known: Iterable[str]) -> str:
    if name == PREFIX or not path.exists():
        choices = ", ".join(sorted(PREFIX + other for other in known))
        raise UserError(f"{name!r} does not ship with specdec: give a path, or one of {choices}")
    return str(path)
