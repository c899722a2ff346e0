"""Models and records that ship with the package, named ``bundled:NAME`` in configurations."""

from __future__ import annotations

from pathlib import Path

from specdec.errors import UserError
from specdec.models.installed import PREFIX as INSTALLED
from specdec.models.installed import installed_path

PREFIX = "bundled:"

_ASSETS = Path(__file__).parents[1] / "assets"


def family_path(name: str) -> str:
    """Returns the path of ``bundled:NAME`` or ``installed:NAME``; other names unchanged."""
    if name.startswith(INSTALLED):
        return str(installed_path(name))
    return _resolve(name, _ASSETS / "tiny", "")


def record_path(name: str) -> str:
    """Returns the path of the recorded run ``bundled:NAME``; other names unchanged."""
    return _resolve(name, _ASSETS / "records", ".npz")


def _resolve(name: str, folder: Path, suffix: str) -> str:
    if not name.startswith(PREFIX):
        return name
    path = folder / (name.removeprefix(PREFIX) + suffix)
    if name == PREFIX or not path.exists():
        known = (p.stem for p in folder.iterdir() if p.suffix == suffix and (suffix or p.is_dir()))
        choices = ", ".join(sorted(PREFIX + other for other in known))
        raise UserError(f"{name!r} does not ship with specdec: give a path, or one of {choices}")
    return str(path)
