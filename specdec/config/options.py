"""Reads the configuration tree on disk: its folder, groups and options."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specdec.errors import UserError
from specdec.files import UNREADABLE, flatten, why_unreadable

Node = Mapping[str, Any]  # a section of a configuration, or a whole one
Trees = Sequence[Path]  # further configuration trees, which come before the library's own

PARTS = ("source", "policy", "verifier", "executor")  # groups that make up a strategy
BASES = {  # group -> base class of what its ``_target_`` may name; None if it takes no ``_target_``
    "strategy": None,
    "source": "specdec.interfaces.TokenSource",
    "policy": "specdec.interfaces.TreePolicy",
    "verifier": "specdec.interfaces.Verifier",
    "executor": "specdec.interfaces.Executor",
    "model": "specdec.pairs.ModelPair",
    "data": "specdec.data.DataReader",
    "sampling": None,
    "serving": "specdec.interfaces.Scheduler",
    "clock": "specdec.clocks.Clock",
    "logger": "specdec.interfaces.Logger",
}
GROUPS = tuple(BASES)
"""Groups whose options can be chosen on the command line; the tree has other folders, too."""

CONFIG_DIR = (Path(__file__).parent.parent / "conf").resolve()
_WRAPPED = 80  # a comment's line of this length or more continues on the next line

YAML_ERRORS = (*UNREADABLE, OmegaConfBaseException, OSError, AttributeError)
"""Errors of reading a YAML; PyYAML raises ``AttributeError`` for a malformed date."""


def config_tree(name: str | Path) -> Path:
    """Returns the folder of a further configuration tree (``--config-dir``, ``config_dirs=``).

    A tree is code: the folder around it is put on ``sys.path``, because its files may name classes
    there.
    """
    folder = Path(name).expanduser()
    if not str(name) or not folder.is_dir():
        raise UserError(
            f"--config-dir {name or 'without a name'} is not a folder: name a configuration tree"
        )
    groups = [group for group in GROUPS if (folder / group).is_dir()]
    if folder.resolve().name in GROUPS and not groups and any(folder.glob("*.yaml")):
        raise UserError(
            f"--config-dir {name} is the folder of a group: name the one around it, {folder.parent}"
        )
    beside = str(folder.resolve().parent)
    if beside not in sys.path:
        sys.path.append(beside)
    return folder


def options(group: str, extra: Trees = ()) -> dict[str, Path]:
    """Returns a group's options, name -> YAML file, sorted. Files whose name begins with an
    underscore are not options; trees in ``extra`` take precedence.
    """
    folders = (Path(root) / group for root in (CONFIG_DIR, *reversed(extra)))
    paths = {path.stem: path for folder in folders for path in folder.glob("[!_]*.yaml")}
    return dict(sorted(paths.items()))


def read_yaml(path: Path, refusal: str, remedy: str = "", *, resolve: bool = False) -> Any:
    try:
        loaded = OmegaConf.to_container(OmegaConf.load(path), resolve=resolve)
        str(loaded)  # Python does not print hexadecimal numbers of too many digits
        return loaded
    except YAML_ERRORS as error:
        raise UserError(f"{refusal} ({why_unreadable(error)}){remedy and f': {remedy}'}") from error


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines()


def first_comment(path: Path) -> str:
    """Returns the file's description: its first comment, which may take several lines.

    Hydra's package header (``# @package``) is skipped.
    """
    found = list[str]()
    for line in _lines(path):
        if line.startswith("#") and "@package" not in line:
            found.append(line.lstrip("# ").strip())
            if len(line) < _WRAPPED or line.endswith("."):
                break
        elif found:
            break
    return " ".join(found).strip()


def stated(path: Path, what: str, seen: Sequence[Path] = ()) -> str:
    """Returns the text of the comment ``# <what>: ...`` in an option's YAML or, if it has none, in
    a YAML of its defaults list; "" if there is no such comment.
    """
    for line in _lines(path):
        if line.startswith(f"# {what}:"):
            return line.partition(":")[2].strip().rstrip(".")
    folders = (path.parent, CONFIG_DIR / path.parent.name)
    bases = [base for base in _read(path)[0] if isinstance(base, str)]
    files = [folder / f"{base}.yaml" for base in bases for folder in folders]
    others = [file for file in files if file.is_file() and file not in (*seen, path)]
    return next(filter(None, (stated(file, what, (*seen, path)) for file in others)), "")


def chosen_parts(path: Path) -> dict[str, str]:
    entries = [entry for entry in _read(path)[0] if isinstance(entry, dict)]
    named = {str(key): str(value) for entry in entries for key, value in entry.items()}
    return {key.removeprefix("override ").lstrip("/"): value for key, value in named.items()}


def own_values(path: Path) -> dict[str, Any]:
    return _read(path)[1]


def _read(path: Path) -> tuple[list[Any], dict[str, Any]]:
    """Returns the defaults list and the other keys of a file of a configuration tree."""
    loaded = read_yaml(path, f"{path} cannot be read", "correct it, or remove it from the tree")
    if not isinstance(loaded, dict):
        raise UserError(f"{path} holds no mapping of keys to values: correct it, or remove it")
    values = {str(key): value for key, value in loaded.items()}
    defaults = values.pop("defaults", None)
    return defaults if isinstance(defaults, list) else [], values


def has_key(config: Any, key: str) -> bool:
    return any(f"{known}.".startswith(f"{key}.") for known in flatten(config))
