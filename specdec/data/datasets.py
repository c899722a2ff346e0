"""Built-in data sets: names, files on this machine, templates and provenance."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from specdec.data.files import data_folder, find_file, sha256_of
from specdec.data.sets import MIXED, SETS, Place
from specdec.errors import UserError

OWN = ("jsonl", "text")
"""Data sets that read the user's file ``data.path``."""

DATASETS: tuple[str, ...] = ("stdlib", *SETS, "mixed", *OWN)
"""Values of ``data=``."""

DEFAULT_FIELD = "prompt"
"""Default of ``data.field``."""

STDLIB_MESSAGE = "Complete this Python function. Answer with the code alone.\n\n{text}"
"""User message for a function head."""


def require_known(name: str) -> None:
    """Checks a data set's name.

    Raises:
        UserError: unknown; the message suggests the nearest name.
    """
    if name not in DATASETS:
        near = get_close_matches(name, DATASETS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(f"data={name!r} is unknown: {hint}choose one of {', '.join(DATASETS)}")


def place_of(
    name: str, *, subset: str | None = None, data_dir: str | Path | None = None
) -> tuple[Place, Path]:
    """A set's place, and its path on this machine.

    Args:
        name: a key of ``SETS``.
        subset: the requested subset; None for none.
        data_dir: folder of data sets; None for SPECDEC_DATA.

    Raises:
        UserError: there is no data folder, or it lacks the set's files.
    """
    entry = SETS[name]
    # Sets with one file per subset have the subset in the file name.
    places = [(place, place.file.replace("{subset}", subset or "")) for place in entry.places]
    shown = entry.shown.replace("{subset}", subset or "")
    folder = data_folder(data_dir, name=name, places=shown)
    for place, file in places:
        path = find_file(folder, (file,))
        if path is not None:
            return place, path
    hub = ", or fetch it with data.origin=hub" if entry.hub is not None else ""
    raise UserError(
        f"data={name}: {str(folder)!r} holds no {shown}; put the file there, or set"
        f" SPECDEC_DATA to the folder that has it{hub} (data=stdlib needs no files)"
    )


def holds(name: str, data_dir: str | Path | None) -> bool:
    """Whether the data folder has a set (its first subset, where each subset is a file)."""
    try:
        place_of(name, subset=first_subset(name), data_dir=data_dir)
    except UserError:
        return False
    return True


def first_subset(name: str) -> str | None:
    """The default subset of a set with one file per subset; None for other sets."""
    entry = SETS[name]
    by_file = any("{subset}" in place.file for place in entry.places)
    return entry.subsets[0] if by_file and entry.subsets else None


def templates_of(name: str) -> dict[str, dict[str, str]]:
    """Templates of a data set by place: for base models and for chat models."""
    require_known(name)
    if name == "stdlib":
        return {"": {"template": "{text}", "message": STDLIB_MESSAGE}}
    if name not in SETS:
        return {"": {"template": "{text}", "message": "{text}"}}
    entry = SETS[name]
    templates = {p.file: {"template": p.template, "message": p.message} for p in entry.places}
    if entry.hub is not None:
        templates["hub"] = {"template": entry.hub.template, "message": entry.hub.message}
    return templates


def data_provenance(
    name: str,
    *,
    sets: Sequence[str] | None = None,
    subset: str | None = None,
    origin: str = "local",
    data_dir: str | Path | None = None,
) -> dict[str, object]:
    """Facts needed to build the same prompts again.

    Args:
        name: the data set.
        sets: sets of ``mixed``.
        subset: the requested subset; None for none.
        origin: local, or hub (without files).
        data_dir: folder of data sets; None for SPECDEC_DATA.

    Returns:
        ``data``, ``templates`` (set -> place -> text), ``templates_sha256``, ``files`` (set -> file
        and its SHA-256, of files in the folder), and for prompts from the standard library
        ``python`` (prompts differ between versions).
    """
    require_known(name)
    names = [name] if name != "mixed" else list(sets or ("stdlib", *MIXED))
    templates = {each: templates_of(each) for each in names}
    digest = hashlib.sha256(repr(sorted(templates.items())).encode()).hexdigest()
    facts: dict[str, object] = {"data": name, "templates": templates, "templates_sha256": digest}
    files = {}
    for each in names:
        if each in SETS and origin == "local" and holds(each, data_dir):
            chosen = subset or first_subset(each)
            place, path = place_of(each, subset=chosen, data_dir=data_dir)
            files[each] = {"file": place.file, "sha256": sha256_of(path)}
    facts["files"] = files
    if "stdlib" in names:
        facts["python"] = ".".join(map(str, sys.version_info[:3]))
    return facts
