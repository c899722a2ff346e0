"""Describes the prompts of a run: the configuration section ``data``, and its provenance."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from specdec.data.files import FIELD, sha256_of
from specdec.data.prompt import DataReader
from specdec.data.sets import (
    DIALOGUES,
    MIXED,
    OWN,
    SETS,
    STDLIB,
    Texts,
    holds,
    place_of,
    require_known,
)
from specdec.errors import UserError
from specdec.parts.build import build_part, locate
from specdec.parts.fields import Count, Index, Text, errors_of, signature_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The keys of the section ``data``, and the reader of a data set outside this library."""

    name: Text  # one of ``DATASETS``
    limit: Count | None = None  # largest number of prompts; None for all
    path: Text | None = None  # file of ``jsonl`` and ``text``
    field: Text | None = None  # of the text in ``jsonl`` (default "prompt"; dots descend)
    template: Text | None = None  # of ``jsonl`` and ``text``; ``{text}`` is a paragraph
    subset: Text | None = None  # part of a set: a subject, a language, a task, a book
    sets: Sequence[str] | None = None  # of ``mixed``, in turn; None for those in the data folder
    origin: Literal["local", "hub"] = "local"
    # Shuffles the set before the limit applies (in ``mixed`` each set by itself), without changing
    # ids; independent of the seed of decoding.
    sample_seed: Index | None = None
    chat: Literal["auto", "never", "always"] = "auto"  # see ``prompt_tokens``
    max_prompt_tokens: Count | None = None  # None for the model's limit
    truncation: Literal["error", "left"] = "left"  # see ``fit_prompt``
    turns: Literal["first", "all"] = "first"  # of dialogues, each after the model's own answers
    reader: DataReader | None = None  # None for a built-in set

    @staticmethod
    def of(**section: Any) -> Request:
        if "_target_" not in section:
            return Request(**section)
        kept = {key: section[key] for key in _OF_RUN if key in section}
        return Request(**kept, reader=_build_reader(section))


_OF_RUN = ("name", "limit", "sample_seed", "chat", "max_prompt_tokens", "truncation", "turns")


def _build_reader(data: Mapping[str, Any]) -> DataReader:
    names = inspect.signature(locate(data["_target_"], "data")).parameters
    options = signature_of(Request).plain
    for key in options:
        if key not in (*_OF_RUN, *names) and data.get(key) not in (None, "local"):
            raise UserError(
                f"data.{key}={data[key]} is not used by data={data['name']}: leave it out"
            )
    keys = {k: v for k, v in data.items() if k in names or k not in options}
    reader: DataReader = build_part(keys, {}, "data", DataReader)
    return reader


def data_provenance(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what is needed to build the prompts of a section ``data`` again.

    That is ``data``, ``templates`` (data set -> file -> texts), ``templates_sha256``, ``files``
    (data set -> file and its SHA-256), and for prompts from the standard library ``python``, whose
    version determines them.
    """
    name = data["name"]
    if "_target_" in data:
        return {"data": name, **_build_reader(data).provenance()}
    templates: dict[str, Any] = {}
    files = {}
    for each in [name] if name != "mixed" else data.get("sets") or ("stdlib", *MIXED):
        if each in OWN:
            templates[each] = {"": Texts("{text}", "{text}")._asdict()}
            continue
        entry = STDLIB if each == "stdlib" else SETS[each]
        texts = {place.file: place.texts for place in entry.places}
        texts |= {} if entry.hub is None else {"hub": entry.hub.texts}
        templates[each] = {at: text._asdict() for at, text in texts.items()}
        if each in SETS and data.get("origin") != "hub" and holds(each):
            place, path = place_of(each, data.get("subset"))
            files[each] = {"file": place.file, "sha256": sha256_of(path)}
    digest = hashlib.sha256(repr(sorted(templates.items())).encode()).hexdigest()
    facts: dict[str, Any] = {"data": name, "templates": templates, "templates_sha256": digest}
    facts["files"] = files
    if "stdlib" in templates:
        facts["python"] = ".".join(map(str, sys.version_info[:3]))
    return facts


_USERS = {  # key of ``data=`` -> data sets that use it
    "path": OWN,
    "field": ("jsonl",),
    "template": OWN,
    "sets": ("mixed",),
    "subset": (*(n for n, entry in SETS.items() if entry.subsets is not None), "speed_bench"),
}


def check_request(request: Request) -> None:
    if request.reader is None:
        require_known(request.name)
    values = {"limit": request.limit, "origin": request.origin, "turns": request.turns}
    for error in errors_of(Request, values, "data."):
        raise UserError(error)
    if request.reader is not None:
        return
    name, path, subset, sets = request.name, request.path, request.subset, request.sets
    if request.turns == "all" and name not in DIALOGUES:
        raise UserError(
            f"data.turns=all is for {', '.join(DIALOGUES)}: prompts of data={name} have one turn,"
            " so leave it out"
        )
    if name in OWN and not path:
        raise UserError(f"data={name} needs data.path=FILE, the file of the prompts")
    for key, users in _USERS.items():
        value = getattr(request, key)
        if value is not None and name not in users:
            raise UserError(
                f"data.{key}={str(value)!r} is not used by data={name}, only by"
                f" {', '.join(f'data={user}' for user in users)}: leave it out"
            )
    if path is not None and not Path(path).expanduser().is_file():
        raise UserError(f"data.path={str(path)!r} is not a file; name an existing one")
    if request.template is not None and request.field is not None:
        raise UserError("data.template has field names: leave out data.field")
    if request.template is not None and not FIELD.search(request.template):
        raise UserError(
            f"data.template={request.template!r} has no {{FIELD}}, so all prompts would be equal:"
            f" write {'{prompt}' if name == 'jsonl' else '{text}'}, or another field's name"
        )
    if sets is not None and (not sets or {*sets} - {"stdlib", *SETS} or len({*sets}) < len(sets)):
        raise UserError(
            f"data.sets={list(sets)} must name different sets of stdlib, {', '.join(SETS)}"
        )
    known = SETS[name].subsets if subset is not None and name in SETS else None
    if known and subset not in known:
        raise UserError(
            f"data.subset={subset!r} is not one of data={name}: choose one of {', '.join(known)}"
        )
    if request.origin == "hub":
        _check_hub(request)


def _check_hub(request: Request) -> None:
    names = [request.name] if request.name != "mixed" else request.sets
    if not names:
        raise UserError("data=mixed data.origin=hub needs data.sets=[NAME,...]")
    having = [name for name, entry in SETS.items() if entry.hub is not None]
    for name in names:
        if name not in having:
            raise UserError(
                f"data={name} is not read from the hub; data.origin=hub has {', '.join(having)}"
            )
        if importlib.util.find_spec("datasets") is None:
            raise UserError(
                f"data={name} data.origin=hub needs the library `datasets`: pip install"
                " 'specdec-lab[hub]', or put the files into the folder that SPECDEC_DATA names"
            )
    if request.subset is not None:
        raise UserError(
            f"data.subset={request.subset!r} is read from local files only; leave out data.origin"
        )
