"""The claims of the papers as data: ``experiments/<paper>/stated.yaml``.

A file has the paper's name and reference and the claims of each table or figure. A claim has
``text``, ``stated`` (a number, a pair [min, max], or a sentence), ``unit``, ``section`` if it
differs from the item's, ``within`` (allowed relative error of a number) and ``mark``: original (in
the available text), known (general knowledge of the original) or reconstructed (from the sentences
around a gap).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from specdec.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
"""Parent of the papers' folders."""

PAPERS = ("specpipe", "pipedec", "ppsd", "swiftspec", "staged", "open")
"""Folders with stated values; ``open`` has questions that the papers leave open."""

MARKS = ("original", "known", "reconstructed", "independent", "open")
"""Origin of a stated value; ``independent`` is a measurement of another group."""

_CLAIM_KEYS = {"text", "stated", "unit", "section", "mark", "within"}
_ITEM_KEYS = {"title", "section", "claims"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One stated value.

    Attributes:
        id: name in the item.
        text: description.
        low, high: the stated range, equal for a number; None for a sentence.
        sentence: the claimed sentence; empty for numbers.
        unit: unit of the numbers; may be empty.
        section: section of the paper.
        mark: one of ``MARKS``.
        within: allowed relative error of a single number.
    """

    id: str
    text: str
    low: float | None
    high: float | None
    sentence: str
    unit: str
    section: str
    mark: str
    within: float

    @property
    def ends(self) -> tuple[float, float]:
        """The stated range of a number."""
        assert self.low is not None
        assert self.high is not None
        return self.low, self.high

    @property
    def stated(self) -> str:
        """The stated value as printed."""
        if self.low is None or self.high is None:
            return self.sentence
        unit = {"x": "x", "%": " %"}.get(self.unit, f" {self.unit}" if self.unit else "")
        if self.low == self.high:
            return f"{self.low:g}{unit}"
        return f"{self.low:g}-{self.high:g}{unit}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """The claims of one table or figure.

    Attributes:
        title, section: title and section of the item.
        claims: claims by id, in the order of the file.
    """

    title: str
    section: str
    claims: Mapping[str, Claim]


@dataclass(frozen=True, slots=True, kw_only=True)
class Paper:
    """The claims of one paper.

    Attributes:
        name: name of the folder.
        title, reference: the method and the citation.
        items: tables and figures by name, in the order of the file.
    """

    name: str
    title: str
    reference: str
    items: Mapping[str, Stated]


def read_paper(name: str, root: Path = ROOT) -> Paper:
    """Reads one paper's stated values.

    Raises:
        UserError: an unknown key, or a value that is neither number, pair nor sentence.
    """
    path = root / name / "stated.yaml"
    with path.open(encoding="utf-8") as stream:
        values = yaml.safe_load(stream)
    items = {key: _stated(f"{path.name} {key}", value) for key, value in values["items"].items()}
    return Paper(name=name, title=values["title"], reference=values["reference"], items=items)


def _stated(where: str, values: Mapping[str, Any]) -> Stated:
    _refuse_unknown(where, values, _ITEM_KEYS)
    section = str(values["section"])
    claims = {
        key: _claim(f"{where} {key}", key, value, section)
        for key, value in (values.get("claims") or {}).items()
    }
    return Stated(title=values["title"], section=section, claims=claims)


def _claim(where: str, key: str, values: Mapping[str, Any], section: str) -> Claim:
    _refuse_unknown(where, values, _CLAIM_KEYS)
    mark = values.get("mark", "original")
    if mark not in MARKS:
        raise UserError(f"{where}: mark={mark} is not one of {', '.join(MARKS)}")
    low, high, sentence = _value(where, values["stated"])
    return Claim(
        id=key,
        text=values["text"],
        low=low,
        high=high,
        sentence=sentence,
        unit=str(values.get("unit", "")),
        section=str(values.get("section", section)),
        mark=mark,
        within=float(values.get("within", 0.05)),
    )


def _value(where: str, stated: Any) -> tuple[float | None, float | None, str]:
    if isinstance(stated, str):
        return None, None, stated
    ends = stated if isinstance(stated, list) else [stated, stated]
    if len(ends) != 2 or not all(isinstance(end, int | float) for end in ends) or ends[0] > ends[1]:
        raise UserError(f"{where}: stated={stated} must be a number, [least, most] or a sentence")
    return float(ends[0]), float(ends[1]), ""


def _refuse_unknown(where: str, values: Mapping[str, Any], known: set[str]) -> None:
    unknown = set(values) - known
    if unknown:
        raise UserError(f"{where}: {sorted(unknown)} are no keys; known are {sorted(known)}")
