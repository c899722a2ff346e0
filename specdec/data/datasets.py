"""Every value of ``data=``: what it is, its fixed templates, and what provenance keeps of it."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from specdec.data.files import data_folder, find_file, sha256_of
from specdec.data.sets import MIXED, SETS, Place
from specdec.errors import UserError

ABOUT = {
    "stdlib": "function heads from held-out modules of the running Python's standard library",
    **{name: entry.about for name, entry in SETS.items()},
    "mixed": "several sets by turns: data.sets=[NAME,...], or those that the data folder holds",
    "jsonl": "data.path=FILE (JSON lines, gzip or not), data.field=NAME of the prompt's text",
    "text": "data.path=FILE split at blank lines, each paragraph a prompt",
}

DATASETS: tuple[str, ...] = tuple(ABOUT)
"""Every value of ``data=``."""

OWN = ("jsonl", "text")
"""Sets made of a file of the user's own."""

DEFAULT_FIELD = "prompt"
"""``data.field`` of ``data=jsonl`` where none is given."""

STDLIB_MESSAGE = "Complete this Python function. Answer with the code alone.\n\n{text}"
"""What a chat model is asked about a function head."""


def describe(name: str) -> str:
    """One line about a data set.

    Raises:
        UserError: there is none of that name.
    """
    require_known(name)
    return ABOUT[name]


def require_known(name: str) -> None:
    """Checks a data set's name.

    Raises:
        UserError: there is none of that name; the nearest is suggested.
    """
    if name not in ABOUT:
        near = get_close_matches(name, DATASETS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(f"data={name!r} is unknown: {hint}choose one of {', '.join(DATASETS)}")


def place_of(
    name: str, *, subset: str | None = None, data_dir: str | Path | None = None
) -> tuple[Place, Path]:
    """Where a set's records lie on this machine.

    Args:
        name: a key of ``SETS``.
        subset: the subset that is wanted, where the set has any.
        data_dir: folder of data sets; None for the one that SPECDEC_DATA names.

    Raises:
        UserError: there is no folder, or it lacks the set: the message says where to put it.
    """
    entry = SETS[name]
    # A set whose subsets are files of their own is looked for with the subset that is wanted.
    places = [(place, place.file.replace("{subset}", subset or "")) for place in entry.places]
    shown = entry.shown.replace("{subset}", subset or "")
    folder = data_folder(data_dir, name=name, places=shown)
    for place, file in places:
        found = find_file(folder, (file,))
        if found is not None:
            return place, found
    hub = ", or fetch it with data.origin=hub" if entry.hub is not None else ""
    raise UserError(
        f"data={name}: {str(folder)!r} holds no {shown}; put the file there, or set"
        f" SPECDEC_DATA to the folder that has it{hub} (data=stdlib needs no files)"
    )


def holds(name: str, data_dir: str | Path | None) -> bool:
    """Whether the data folder has a set (its first subset, where subsets are files)."""
    try:
        place_of(name, subset=first_subset(name), data_dir=data_dir)
    except UserError:
        return False
    return True


def first_subset(name: str) -> str | None:
    """The subset taken where none is asked for: only sets with a file per subset have one."""
    entry = SETS[name]
    by_file = any("{subset}" in place.file for place in entry.places)
    return entry.subsets[0] if by_file and entry.subsets else None


def templates_of(name: str) -> dict[str, dict[str, str]]:
    """The fixed words of a data set, per place: what base models and chat models are given."""
    require_known(name)
    if name == "stdlib":
        return {"": {"template": "{text}", "message": STDLIB_MESSAGE}}
    if name not in SETS:
        return {"": {"template": "{text}", "message": "{text}"}}
    entry = SETS[name]
    found = {p.file: {"template": p.template, "message": p.message} for p in entry.places}
    if entry.hub is not None:
        found["hub"] = {"template": entry.hub.template, "message": entry.hub.message}
    return found


def data_provenance(
    name: str,
    *,
    sets: Sequence[str] | None = None,
    subset: str | None = None,
    origin: str = "local",
    data_dir: str | Path | None = None,
) -> dict[str, object]:
    """What must be known to build the same prompts again.

    Args:
        name: the data set.
        sets: of ``mixed``.
        subset: the subset, where one was asked for.
        origin: local, or hub (then no files are named).
        data_dir: folder of data sets; None for the one that SPECDEC_DATA names.

    Returns:
        ``data``, ``templates`` (set -> place -> words), ``templates_sha256``, ``files`` (set ->
        file and its SHA-256, for those that the folder holds), and for sets with standard library
        prompts ``python`` (another version has other prompts).
    """
    require_known(name)
    names = [name] if name != "mixed" else list(sets or ("stdlib", *MIXED))
    templates = {each: templates_of(each) for each in names}
    digest = hashlib.sha256(repr(sorted(templates.items())).encode()).hexdigest()
    found: dict[str, object] = {"data": name, "templates": templates, "templates_sha256": digest}
    files = {}
    for each in names:
        if each in SETS and origin == "local" and holds(each, data_dir):
            chosen = subset or first_subset(each)
            place, path = place_of(each, subset=chosen, data_dir=data_dir)
            files[each] = {"file": place.file, "sha256": sha256_of(path)}
    found["files"] = files
    if "stdlib" in names:
        found["python"] = ".".join(map(str, sys.version_info[:3]))
    return found
