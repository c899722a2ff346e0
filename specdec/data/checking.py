"""What can be wrong with the keys of ``data=``, found without reading a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from specdec.data.datasets import ABOUT, OWN, require_known
from specdec.data.files import data_folder
from specdec.data.hub import require_datasets
from specdec.data.sets import MIXED, SETS
from specdec.errors import UserError

if TYPE_CHECKING:
    from specdec.data.prompts import Request


def check_request(request: Request) -> None:
    """Checks which keys were given, and their values.

    Raises:
        UserError: naming the key, its value and the remedy.
    """
    require_known(request.name)
    if request.limit is not None and request.limit < 1:
        raise UserError(
            f"data.limit={request.limit} must be at least 1 (leave it out for all prompts)"
        )
    _check_own_file(request)
    _check_sets(request)
    _check_subset(request)
    _check_origin(request)


def _check_own_file(request: Request) -> None:
    name, path, field = request.name, request.path, request.field
    if name in OWN:
        if not path:
            raise UserError(f"data={name} needs data.path=FILE, the file to read prompts from")
        if not Path(path).expanduser().is_file():
            raise UserError(f"data.path={str(path)!r} is not a file; name an existing one")
    elif path:
        raise UserError(
            f"data.path={str(path)!r} is not used by data={name}; use data=jsonl or data=text for"
            " a file of your own"
        )
    if field is not None and name != "jsonl":
        raise UserError(f"data.field={field!r} is not used by data={name}, only by data=jsonl")
    if request.template is None:
        return
    if name not in OWN:
        raise UserError(
            f"data.template is not used by data={name}, whose words are fixed; use data=jsonl or"
            " data=text for a file of your own"
        )
    if field is not None:
        raise UserError("data.template names fields itself: leave out data.field")


def _check_sets(request: Request) -> None:
    if request.sets is None:
        if request.name == "mixed" and request.data_dir is not None:
            data_folder(request.data_dir, name="mixed", places="any of " + ", ".join(MIXED))
        return
    if request.name != "mixed":
        raise UserError(f"data.sets is not used by data={request.name}, only by data=mixed")
    wrong = [name for name in request.sets if name not in ("stdlib", *SETS)]
    if wrong or len(set(request.sets)) != len(request.sets) or not request.sets:
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
    if request.origin not in ("local", "hub"):
        raise UserError(f"data.origin={request.origin!r} is unknown: use local or hub")
    if request.origin == "local":
        return
    names = [request.name] if request.name != "mixed" else list(request.sets or ())
    if not names:
        raise UserError("data=mixed data.origin=hub needs data.sets=[NAME,...]")
    for name in names:
        if name not in SETS or SETS[name].hub is None:
            having = ", ".join(each for each, entry in SETS.items() if entry.hub is not None)
            about = ABOUT.get(name, name)
            raise UserError(
                f"data={name} ({about}) is not read from the hub; data.origin=hub has {having}"
            )
        require_datasets(name)
    if request.subset is not None:
        raise UserError(
            f"data.subset={request.subset!r} is read from local files only; leave out data.origin"
        )
