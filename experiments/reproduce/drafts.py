"""Whose guesses drive a simulated table: recorded, synthetic or traced (``drafts.yaml``)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from experiments.reproduce.findings import Findings
from experiments.reproduce.items import SIZE, Item
from experiments.reproduce.lab import Lab
from specdec.errors import UserError


@dataclass(frozen=True, slots=True)
class Draft:
    """One origin of hits.

    Attributes:
        name: in ``drafts.yaml``.
        title: as printed.
        short: the same in pictures.
        words: overrides that choose model, prompts and length.
    """

    name: str
    title: str
    short: str
    words: tuple[str, ...]


@cache
def known_drafts() -> Mapping[str, Mapping[str, Any]]:
    """The content of ``drafts.yaml``."""
    path = Path(__file__).with_name("drafts.yaml")
    found: Mapping[str, Mapping[str, Any]] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return found


def drafts(names: Sequence[str], item: Item, lab: Lab, findings: Findings) -> Iterator[Draft]:
    """The drafts of these names, then the user's own record where there is one.

    One that cannot be had goes to ``findings.missing``.
    """
    for name in names:
        try:
            yield make_draft(name, item, lab)
        except UserError as error:
            findings.missing.append(f"{known_drafts()[name]['title']}: {error}")
    if lab.own_record is not None:
        words = ("model=replay", f"model.record={lab.own_record}", *size_words(item, lab))
        title = f"own record {lab.own_record.name}, replayed"
        yield Draft(name="own", title=title, short="own record", words=words)


def make_draft(name: str, item: Item, lab: Lab) -> Draft:
    """One draft at the item's size; real models are recorded at the first call.

    Raises:
        UserError: it needs data that are not there.
    """
    found = known_drafts()[name]
    size = size_words(item, lab)
    if "record" in found:
        path = lab.record([*found["record"], *_record_size(item, lab)])
        words: tuple[str, ...] = ("model=replay", f"model.record={path}", *size)
    elif "trace" in found:
        file, method = found["trace"]
        path = _data_folder() / "acceptance_traces" / file
        words = ("model=replay", f"model.record={path}", f"model.method={method}", *size)
    else:
        words = (*found["words"], *size)
    return Draft(name=name, title=found["title"], short=found["short"], words=words)


def size_words(item: Item, lab: Lab) -> tuple[str, str]:
    """How many prompts and tokens."""
    prompts, tokens = item.size["quick" if lab.quick else "full"]
    return f"data.limit={prompts}", f"max_new_tokens={tokens}"


def _record_size(item: Item, lab: Lab) -> tuple[str, str]:
    """As ``size_words``, at least the size that most items have: they share one record."""
    kind = "quick" if lab.quick else "full"
    prompts, tokens = map(max, zip(item.size[kind], SIZE[kind], strict=True))
    return f"data.limit={prompts}", f"max_new_tokens={tokens}"


def _data_folder() -> Path:
    folder = os.environ.get("SPECDEC_DATA")
    if not folder:
        raise UserError("SPECDEC_DATA does not name the folder of the data sets")
    return Path(folder)
