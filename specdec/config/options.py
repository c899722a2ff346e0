"""Reads the configuration tree on disk: its folder, groups and options."""

import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specdec.errors import UserError
from specdec.files import UNREADABLE, why_unreadable

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

_WRAPPED = 80  # a comment's line of this length or more continues on the next line

YAML_ERRORS = (*UNREADABLE, OmegaConfBaseException, OSError, AttributeError)
"""Errors of reading a YAML; PyYAML raises ``AttributeError`` for a malformed date."""


@cache
def config_dir() -> Path:
    return (Path(__file__).parent.parent / "conf").resolve()


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
    beside = str(folder.resolve().parent)
    if beside not in sys.path:
        sys.path.append(beside)
    return folder


def options(group: str, extra: Iterable[Path] = ()) -> dict[str, Path]:
    """Returns a group's options, name -> YAML file, sorted; files that begin with an underscore are
    none, and trees in ``extra`` take precedence.
    """
    paths: dict[str, Path] = {}
    for root in (*extra, config_dir()):
        for path in sorted((Path(root) / group).glob("*.yaml")):
            if not path.stem.startswith("_"):
                paths.setdefault(path.stem, path)
    return dict(sorted(paths.items()))


def read_yaml(path: Path, refusal: str, remedy: str = "", *, resolve: bool = False) -> Any:
    try:
        loaded = OmegaConf.to_container(OmegaConf.load(path), resolve=resolve)
        str(loaded)  # Python does not print hexadecimal numbers of too many digits
        return loaded
    except YAML_ERRORS as error:
        raise UserError(f"{refusal} ({why_unreadable(error)}){remedy and f': {remedy}'}") from error


def first_comment(path: Path) -> str:
    """Returns the file's description: its first comment, which may take several lines.

    Hydra's package header is no description.
    """
    found = ""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if not line.startswith("#") or "@package" in line:
            if found:
                break
            continue
        found = f"{found} {line.lstrip('# ').strip()}".strip()
        if len(line) < _WRAPPED or line.endswith("."):
            break
    return found


def stated(path: Path, what: str) -> str:
    """Returns the text of the comment ``# <what>: ...`` in an option's YAML, or in one that its
    defaults list extends; "" if none has it.
    """
    seen, waiting = set[Path](), [path]
    while waiting:
        file = waiting.pop(0)
        if file in seen or not file.is_file():
            continue
        seen.add(file)
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith(f"# {what}:"):
                return line.partition(":")[2].strip().rstrip(".")
        bases = [base for base in _defaults(file) if isinstance(base, str)]
        folders = (file.parent, config_dir() / file.parent.name)
        waiting += [folder / f"{base}.yaml" for base in bases for folder in folders]
    return ""


def chosen_parts(path: Path) -> dict[str, str]:
    entries = [entry for entry in _defaults(path) if isinstance(entry, dict)]
    named = {str(key): str(value) for entry in entries for key, value in entry.items()}
    return {key.removeprefix("override ").lstrip("/"): value for key, value in named.items()}


def _mapping(path: Path) -> dict[str, Any]:
    loaded = read_yaml(path, f"{path} cannot be read", "correct it, or remove it from the tree")
    if not isinstance(loaded, dict):
        raise UserError(f"{path} holds no mapping of keys to values: correct it, or remove it")
    return {str(key): value for key, value in loaded.items()}


def _defaults(path: Path) -> list[Any]:
    defaults = _mapping(path).get("defaults")
    return defaults if isinstance(defaults, list) else []


def own_values(path: Path) -> dict[str, Any]:
    return {key: value for key, value in _mapping(path).items() if key != "defaults"}


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(config, dict) or not config:
        return {prefix: config} if prefix else {}
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat.update(flatten(value, f"{prefix}.{key}" if prefix else str(key)))
    return flat


def has_key(config: Any, key: str) -> bool:
    return any(f"{known}.".startswith(f"{key}.") for known in flatten(config))
