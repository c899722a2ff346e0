"""The prompts of a run: the keys of ``data=``, checked without reading a file."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from specdec.data.datasets import OWN, data_provenance, require_known
from specdec.data.files import data_folder
from specdec.data.hub import require_datasets
from specdec.data.prompt import DataReader
from specdec.data.sets import MIXED, SETS
from specdec.errors import UserError
from specdec.parts.build import build_part, locate
from specdec.parts.fields import Count, Index, Text, errors_of, signature_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The keys of ``data=`` that choose prompts.

    Attributes:
        name: one of ``DATASETS``.
        limit: largest number of prompts; None for all.
        path: file of ``jsonl`` and ``text``.
        field: field of the text in ``jsonl`` (default "prompt"; dots descend).
        template: template of ``jsonl`` and ``text``; ``{field}`` is a record's field, ``{text}`` a
            paragraph.
        subset: one part of a set with subsets (a subject, a language, a task, a book).
        sets: sets of ``mixed``, in turn; None for those in the data folder.
        origin: "local", or "hub" for the copy on the Hugging Face hub.
        sample_seed: shuffles the data set before the limit applies (in ``mixed`` each set by
            itself); None keeps its order. Ids do not change. Independent of the seed of decoding.
        data_dir: folder of data sets; None for SPECDEC_DATA.
        reader: a class outside this library that reads the prompts; None for a built-in set.
    """

    name: str
    limit: int | None = None
    path: str | Path | None = None
    field: str | None = None
    template: str | None = None
    subset: str | None = None
    sets: Sequence[str] | None = None
    origin: str = "local"
    sample_seed: int | None = None
    data_dir: str | Path | None = None
    reader: DataReader | None = None

    @staticmethod
    def of(
        *,
        name: Text,
        limit: Count | None = None,
        path: Text | None = None,
        field: Text | None = None,
        template: Text | None = None,
        subset: Text | None = None,
        sets: Sequence[str] | None = None,
        origin: Literal["local", "hub"] = "local",
        sample_seed: Index | None = None,
        chat: Literal["auto", "never", "always"] = "auto",
        max_prompt_tokens: Count | None = None,
        truncation: Literal["error", "left"] = "left",
        **reader: Any,
    ) -> Request:
        """The request that a configuration's section ``data`` describes.

        Args:
            name, limit, path, field, template, subset, sets, origin, sample_seed: see the class.
            chat: when prompts use the model's chat template; ignored here.
            max_prompt_tokens, truncation: see ``fit_prompt``; ignored here.
            reader: ``_target_`` and further keys of a reader outside this library.

        Raises:
            UserError: a reader's class cannot be imported or refuses its arguments.
        """
        prompts = {"name": name, "limit": limit, "sample_seed": sample_seed}
        files = {"path": path, "field": field, "template": template, "subset": subset}
        chosen: dict[str, Any] = {**prompts, **files, "sets": sets, "origin": origin}
        if not reader:
            return Request(**chosen)
        lengths = {"max_prompt_tokens": max_prompt_tokens, "truncation": truncation}
        section = {**chosen, **lengths, "chat": chat, **reader}
        return Request(**prompts, reader=_build_reader(section))  # type: ignore[arg-type]


def _build_reader(data: Mapping[str, Any]) -> DataReader:
    """The reader of a section with ``_target_``, given the keys that its constructor names.

    Raises:
        UserError: see ``Request.of``; a key is set that the constructor does not name.
    """
    names = inspect.signature(locate(data["_target_"], "data")).parameters
    for key in ("path", "field", "template", "subset", "sets", "origin"):
        if key not in names and data.get(key) not in (None, "local"):
            raise UserError(
                f"data.{key}={data[key]} is not used by data={data['name']}: leave it out"
            )
    keys = {k: v for k, v in data.items() if k in names or k not in signature_of(Request.of).plain}
    reader: DataReader = build_part(keys, {}, "data", DataReader)
    return reader


def section_provenance(data: Mapping[str, Any]) -> dict[str, Any]:
    """``data_provenance`` of a configuration's section ``data``, or its reader's ``provenance``."""
    if "_target_" in data:
        facts: dict[str, Any] = getattr(_build_reader(data), "provenance", dict)()
        return {"data": data["name"], **facts}
    chosen = {key: data.get(key) for key in ("sets", "subset")}
    return data_provenance(data["name"], origin=data.get("origin", "local"), **chosen)


def check_request(request: Request) -> None:
    """Checks the keys and their values.

    Raises:
        UserError: a key that does not apply to the data set, or an unusable value.
    """
    if request.reader is None:
        require_known(request.name)
    values = {"limit": request.limit, "origin": request.origin}
    for error in errors_of(Request.of, values, "data."):
        raise UserError(error)
    if request.reader is not None:
        return
    _check_own_file(request)
    _check_sets(request)
    _check_subset(request)
    _check_origin(request)


def _check_own_file(request: Request) -> None:
    name, path, field = request.name, request.path, request.field
    if name in OWN:
        if not path:
            raise UserError(f"data={name} needs data.path=FILE, the file of the prompts")
        if not Path(path).expanduser().is_file():
            raise UserError(f"data.path={str(path)!r} is not a file; name an existing one")
    elif path:
        raise UserError(
            f"data.path={str(path)!r} is not used by data={name}; use data=jsonl or data=text to"
            " read a file"
        )
    if field is not None and name != "jsonl":
        raise UserError(f"data.field={field!r} is not used by data={name}, only by data=jsonl")
    if request.template is None:
        return
    if name not in OWN:
        raise UserError(
            f"data.template is not used by data={name}, whose template is fixed; use data=jsonl or"
            " data=text to read a file"
        )
    if field is not None:
        raise UserError("data.template has field names: leave out data.field")


def _check_sets(request: Request) -> None:
    if request.sets is None:
        if request.name == "mixed" and request.data_dir is not None:
            data_folder(request.data_dir, name="mixed", places="any of " + ", ".join(MIXED))
        return
    if request.name != "mixed":
        raise UserError(f"data.sets is not used by data={request.name}, only by data=mixed")
    unknown = [name for name in request.sets if name not in ("stdlib", *SETS)]
    if unknown or len(set(request.sets)) != len(request.sets) or not request.sets:
        raise UserError(
            f"data.sets={list(request.sets)} must name different sets of stdlib, {', '.join(SETS)}"
        )


def _check_subset(request: Request) -> None:
    name, subset = request.name, request.subset
    if subset is None:
        return
    known = SETS[name].subsets if name in SETS else None
    if known is None:
        having = ", ".join(each for each, entry in SETS.items() if entry.subsets is not None)
        raise UserError(
            f"data.subset={subset!r} is not used by data={name}; sets with subsets are {having}"
        )
    if known and subset not in known:
        raise UserError(
            f"data.subset={subset!r} is not one of data={name}: choose one of {', '.join(known)}"
        )


def _check_origin(request: Request) -> None:
    if request.origin == "local":
        return
    names = [request.name] if request.name != "mixed" else list(request.sets or ())
    if not names:
        raise UserError("data=mixed data.origin=hub needs data.sets=[NAME,...]")
    for name in names:
        if name not in SETS or SETS[name].hub is None:
            having = ", ".join(each for each, entry in SETS.items() if entry.hub is not None)
            raise UserError(f"data={name} is not read from the hub; data.origin=hub has {having}")
        require_datasets(name)
    if request.subset is not None:
        raise UserError(
            f"data.subset={request.subset!r} is read from local files only; leave out data.origin"
        )
