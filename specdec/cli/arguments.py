"""Reads the words after a command: flags, names, and overrides in Hydra's grammar."""

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any, TypeVar, get_args

from specdec.config.options import GROUPS, config_tree
from specdec.errors import UserError
from specdec.parts.fields import Text, did_you_mean, signature_of

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Arguments:
    """Arguments of a command; ``cfg``, ``info``: values of ``--cfg``, ``--info``, "" if absent."""

    overrides: tuple[str, ...]
    flags: frozenset[str] = frozenset()
    config_dirs: tuple[Path, ...] = ()
    cfg: str = ""
    info: str = ""


@dataclass(frozen=True, kw_only=True)
class OneModel:
    dtype: Annotated[Text, "of the weights"] = "float32"
    device: Annotated[Text, "that computes"] = "cpu"


_SHORT = {
    "-h": "--help",
    "-m": "--multirun",
    "-c": "--cfg",
    "-i": "--info",
    "-cd": "--config-dir",
}
_CHOICES = {
    "--cfg": ("job", "hydra", "all"),
    "--info": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
}


def read_arguments(words: Sequence[str], flags: Collection[str] = ()) -> Arguments:
    known = ("--help", "--config-dir", *flags)
    overrides, flags_set, trees, chosen = [], set(), [], {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        name = _SHORT.get(name, name)
        if not word.startswith("-"):
            overrides.append(word)
        elif name == "--config-dir":
            trees.append(config_tree(value if equals else rest.pop(0) if rest else ""))
        elif name in known and name in _CHOICES:
            options = _CHOICES[name]
            if not equals:
                value = rest.pop(0) if rest and rest[0] in options else options[0]
            if value not in options:
                raise UserError(f"{word}: {name} takes {', '.join(options)}; {options[0]} if none")
            chosen[name.strip("-")] = value
        elif name in known and not equals:
            flags_set.add(name)
        else:
            key, hint = name.lstrip("-"), did_you_mean(name, known)
            if key.partition(".")[0] in GROUPS or (equals and not hint.startswith("did")):
                hint = f"write {key}={value if equals else ' '.join(rest[:1]) or 'VALUE'}"
            raise UserError(f"{word} is not a flag of this command: {hint}")
    return Arguments(tuple(overrides), frozenset(flags_set), tuple(trees), **chosen)


def read_values(
    words: Sequence[str], schema: Callable[..., _T], wanted: str, most: float = 1, least: int = 1
) -> tuple[list[str], _T]:
    """Separates names, such as folders, from the keys of a command, which are the annotated
    arguments of ``schema``.

    ``wanted`` describes the names in the error for fewer than ``least`` or more than ``most``.
    Returns the names, and the result of ``schema`` for the keys' values.
    """
    from specdec.config.hydra import read_keys  # `specdec list` does without Hydra

    names, values = read_keys(words, schema)
    for word in names:
        key, equals, _ = word.partition("=")
        if equals and "/" not in key and not Path(word).expanduser().exists():
            hint = did_you_mean(key, signature_of(schema).plain)
            raise UserError(f"{word} is not an option: {hint}")
    if not least <= len(names) <= most:
        raise UserError(f"give {wanted}, not {len(names)}: see --help")
    return names, schema(**values)


def help_of(schema: type[Any]) -> str:
    lines = []
    for p in inspect.signature(schema, eval_str=True).parameters.values():
        shown = f"{p.name}={p.default if isinstance(p.default, str | int | float) else ''}"
        text = "; ".join(part for part in get_args(p.annotation) if isinstance(part, str))
        lines.append(fill(text, 100, initial_indent=f"  {shown:<22} ", subsequent_indent=" " * 25))
    return "\n".join(lines)


def install_named(
    words: Sequence[str],
    command: str,
    known: Collection[str],
    install: Callable[[str, Callable[[str], None]], object],
) -> bool:
    """Installs the names that follow the word ``install`` of ``command`` (models, rivals), and
    returns whether there are any. A name that is not in ``known`` raises ``UserError``.
    """
    if words and (words[0] != "install" or len(words) == 1):
        names = " ".join(words[1:]) or "NAME"
        raise UserError(f"{' '.join(words)}: write `specdec {command} install {names}`")
    for name in words[1:]:
        if name not in known:
            raise UserError(
                f"{name} is not listed by `specdec {command}`: {did_you_mean(name, known)}"
            )
    for name in words[1:]:
        install(name, print)
    return bool(words)
