"""What stands on the command line besides overrides."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specdec.errors import UserError
from specdec.parts.suggest import did_you_mean


@dataclass(frozen=True, slots=True)
class Arguments:
    """The words after a command, sorted out.

    Attributes:
        overrides: key=value and group=option, in order.
        flags: the flags given, by their long name.
        config_dirs: further configuration trees (``--config-dir``); modules beside them can be
            imported, so that their YAML may name classes there.
    """

    overrides: tuple[str, ...]
    flags: frozenset[str]
    config_dirs: tuple[Path, ...]


_SHORT = {"-h": "--help", "-m": "--multirun"}


def read_arguments(words: Sequence[str], *, flags: Sequence[str]) -> Arguments:
    """Separates overrides from flags.

    Args:
        words: what follows the command.
        flags: long names that this command knows; ``--help`` and ``--config-dir DIR`` always.

    Raises:
        UserError: an unknown flag, or a folder that is not there.
    """
    overrides, given, folders = [], set(), []
    rest = iter(words)
    for word in rest:
        name, equals, value = _SHORT.get(word, word).partition("=")
        if not word.startswith("-"):
            overrides.append(word)
        elif name == "--config-dir":
            named = value if equals else next(rest, "")
            folder = Path(named).expanduser()
            if not named or not folder.is_dir():
                raise UserError(
                    f"--config-dir {named or 'without a name'} is not a folder: name a"
                    " configuration tree"
                )
            folders.append(folder)
            _make_importable(folder)
        elif name in ("--help", *flags) and not equals:
            given.add(name)
        else:
            known = ("--help", "--config-dir", *flags)
            raise UserError(f"{word} is not a flag of this command: {did_you_mean(name, known)}")
    return Arguments(tuple(overrides), frozenset(given), tuple(folders))


def _make_importable(tree: Path) -> None:
    """Lets ``_target_`` name modules that lie beside a configuration tree."""
    beside = str(tree.resolve().parent)
    if beside not in sys.path:
        sys.path.append(beside)
