"""Models and records that ship with the package, named ``bundled:NAME`` in configurations."""

from __future__ import annotations

from pathlib import Path

from specdec.errors import UserError

PREFIX = "bundled:"

_ASSETS = Path(__file__).parents[1] / "assets"


def family_path(name: str) -> str:
    """Returns the path of ``bundled:NAME`` in the bundled model family; other names unchanged."""
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
