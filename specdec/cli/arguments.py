"""Separates a command's flags from its overrides."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from specdec.errors import UserError
from specdec.parts.fields import did_you_mean


@dataclass(frozen=True, slots=True)
class Arguments:
    """The parsed words after a command.

    Attributes:
        config_dirs: further configuration trees (``--config-dir``). Their parent folders are put on
            ``sys.path``, so that their YAML files may name classes there.
        cfg, info: values of ``--cfg`` and ``--info``; "" if they are not set.
    """

    overrides: tuple[str, ...]
    flags: frozenset[str]
    config_dirs: tuple[Path, ...]
    cfg: str = ""
    info: str = ""


_SHORT = {
    "-h": "--help",
    "-m": "--multirun",
    "-c": "--cfg",
    "-i": "--info",
    "-cd": "--config-dir",
    "-cn": "--config-name",
    "-cp": "--config-path",
    "-sc": "--shell-completion",
    "-r": "--run",
    "-p": "--package",
}
_CHOICES = {
    "--cfg": ("job", "hydra", "all"),
    "--info": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
}
_NOT_HERE = {
    "--config-name": "every command has its own root; put a group experiment/NAME.yaml into a tree"
    " of your own and use --config-dir DIR +experiment=NAME",
    "--config-path": "use --config-dir DIR, which adds a tree of your own to the library's",
    "--hydra-help": "use --help; of Hydra's flags, -m, --cfg, --info and --config-dir work here",
    "--shell-completion": "use `specdec list`, which shows every option of every group",
    "--run": "leave it out: without -m there is one run",
    "--resolve": "leave it out: --cfg prints resolved values",
    "--package": "leave it out: --cfg prints the whole configuration",
    "--experimental-rerun": "start the same command with the same output_dir again",
}
"""Flags of Hydra that this command line refuses, with advice for the error message."""


def read_arguments(words: Sequence[str], *, flags: Sequence[str]) -> Arguments:
    """Parses words; ``flags`` are the command's own besides ``--help`` and ``--config-dir DIR``."""
    known = ("--help", "--config-dir", *flags)
    overrides, flags_set, folders, chosen = [], set(), [], {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        name = _SHORT.get(name, name)
        if not word.startswith("-"):
            overrides.append(word)
        elif name == "--config-dir":
            folders.append(_tree(value if equals else rest.pop(0) if rest else ""))
        elif name in known and name in _CHOICES:
            options = _CHOICES[name]
            if not equals:
                value = rest.pop(0) if rest and rest[0] in options else options[0]
            if value not in options:
                raise UserError(f"{word}: {name} takes {', '.join(options)}; {options[0]} if none")
            chosen[name.strip("-")] = value
        elif name in known and not equals:
            flags_set.add(name)
        elif name in _NOT_HERE:
            raise UserError(f"{name} does not apply here: {_NOT_HERE[name]}")
        else:
            raise UserError(f"{word} is not a flag of this command: {did_you_mean(name, known)}")
    return Arguments(tuple(overrides), frozenset(flags_set), tuple(folders), **chosen)


def read_folder(
    words: Sequence[str], command: str, options: Mapping[str, tuple[str, str]]
) -> tuple[Path, dict[str, re.Match[str]]]:
    """Parses one folder and its options; see ``read_folders``."""
    (folder,), values = read_folders(words, command, options)
    return folder, values


def read_folders(
    words: Sequence[str], command: str, options: Mapping[str, tuple[str, str]], *, most: int = 1
) -> tuple[list[Path], dict[str, re.Match[str]]]:
    """Parses 1 to ``most`` folders and options of the form key=value.

    ``options`` maps a key to the regular expression of its value and to advice for values that do
    not match. Returns the folders, and for each given key the match of its value.
    """
    folders, values = [], {}
    for word in read_arguments(words, flags=()).overrides:
        key, equals, value = word.partition("=")
        if not equals or key not in options:
            folders.append(word)
            continue
        pattern, remedy = options[key]
        match = re.fullmatch(pattern, value)
        if match is None:
            raise UserError(f"{word} cannot be read: {remedy}")
        values[key] = match
    if not 1 <= len(folders) <= most:
        wanted = "one folder" if most == 1 else f"one folder, or up to {most}"
        raise UserError(
            f"specdec {command} takes {wanted}, not {len(folders)}: `specdec {command} --help`"
        )
    return [Path(folder).expanduser() for folder in folders], values


def read_keys(
    words: Sequence[str], defaults: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Returns the words without "=", and ``defaults`` updated by the words ``key=value``."""
    values, others = dict(defaults), []
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            others.append(word)
        elif key in defaults and value:
            values[key] = value
        else:
            raise UserError(f"{word}: unknown key; use one of {', '.join(defaults)}")
    return others, values


def _tree(name: str) -> Path:
    """Checks a configuration tree; puts its parent on ``sys.path``, for classes in ``_target_``."""
    folder = Path(name).expanduser()
    if not name or not folder.is_dir():
        raise UserError(
            f"--config-dir {name or 'without a name'} is not a folder: name a configuration tree"
        )
    beside = str(folder.resolve().parent)
    if beside not in sys.path:
        sys.path.append(beside)
    return folder


def names_to_install(
    words: Sequence[str], command: str, kind: str, known: Collection[str]
) -> list[str]:
    """Reads ``[install NAME...]`` of ``specdec COMMAND``; returns no names without arguments.

    A name that is not ``known`` is a ``UserError``, which calls it no ``kind``, such as "model".
    """
    given = read_arguments(words, flags=()).overrides
    if not given:
        return []
    action, *names = given
    if action != "install" or not names:
        raise UserError(
            f"specdec {command} {' '.join(given)}: use `specdec {command} install NAME`"
        )
    for name in names:
        if name not in known:
            raise UserError(f"{name} is no {kind}: {did_you_mean(name, known)}")
    return names
