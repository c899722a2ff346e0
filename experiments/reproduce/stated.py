"""What the papers state, as data: ``experiments/<paper>/stated.yaml``.

A file has the paper's name and reference and, per table or figure, its claims. A claim has
``text``, ``stated`` (a number, a pair [least, most], or a sentence that holds or does not),
``unit``, ``section`` where it differs from the item's, ``within`` (how near a number counts as met)
and ``mark``: original (in the text at hand), known (general knowledge of the original) or
reconstructed (follows from the sentences around a gap).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from specdec.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
"""The folder of the papers' folders."""

PAPERS = ("specpipe", "pipedec", "ppsd", "swiftspec", "staged", "open")
"""Folders that hold stated values; ``open`` asks what the papers leave open and states nothing."""

MARKS = ("original", "known", "reconstructed", "independent", "open")
"""Where a stated value comes from; ``independent`` is somebody else's measurement."""

_CLAIM_KEYS = {"text", "stated", "unit", "section", "mark", "within"}
_ITEM_KEYS = {"title", "section", "claims"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One stated value.

    Attributes:
        id: its name in the item.
        text: what it is about.
        low, high: the stated range, equal for a number; None for a sentence.
        sentence: what is said to hold; "" for numbers.
        unit: of the numbers, "" for none.
        section: of the paper.
        mark: one of ``MARKS``.
        within: relative distance at which a single number still counts as met.
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
        title, section: of the item.
        claims: by id, in the file's order.
    """

    title: str
    section: str
    claims: Mapping[str, Claim]


@dataclass(frozen=True, slots=True, kw_only=True)
class Paper:
    """What one paper states.

    Attributes:
        name: the folder's name.
        title, reference: the method, and where the paper is.
        items: by name, in the file's order.
    """

    name: str
    title: str
    reference: str
    items: Mapping[str, Stated]


def read_paper(name: str, root: Path = ROOT) -> Paper:
    """Reads one paper's stated values.

    Raises:
        UserError: a key that is not known, a value that is neither number, pair nor sentence.
    """
    path = root / name / "stated.yaml"
    with path.open(encoding="utf-8") as stream:
        found = yaml.safe_load(stream)
    items = {key: _stated(f"{path.name} {key}", value) for key, value in found["items"].items()}
    return Paper(name=name, title=found["title"], reference=found["reference"], items=items)


def _stated(where: str, found: Mapping[str, Any]) -> Stated:
    _refuse_unknown(where, found, _ITEM_KEYS)
    section = str(found["section"])
    claims = {
        key: _claim(f"{where} {key}", key, value, section)
        for key, value in (found.get("claims") or {}).items()
    }
    return Stated(title=found["title"], section=section, claims=claims)


def _claim(where: str, key: str, found: Mapping[str, Any], section: str) -> Claim:
    _refuse_unknown(where, found, _CLAIM_KEYS)
    mark = found.get("mark", "original")
    if mark not in MARKS:
        raise UserError(f"{where}: mark={mark} is none of {', '.join(MARKS)}")
    low, high, sentence = _value(where, found["stated"])
    return Claim(
        id=key,
        text=found["text"],
        low=low,
        high=high,
        sentence=sentence,
        unit=str(found.get("unit", "")),
        section=str(found.get("section", section)),
        mark=mark,
        within=float(found.get("within", 0.05)),
    )


def _value(where: str, stated: Any) -> tuple[float | None, float | None, str]:
    if isinstance(stated, str):
        return None, None, stated
    ends = stated if isinstance(stated, list) else [stated, stated]
    if len(ends) != 2 or not all(isinstance(end, int | float) for end in ends) or ends[0] > ends[1]:
        raise UserError(f"{where}: stated={stated} must be a number, [least, most] or a sentence")
    return float(ends[0]), float(ends[1]), ""


def _refuse_unknown(where: str, found: Mapping[str, Any], known: set[str]) -> None:
    unknown = set(found) - known
    if unknown:
        raise UserError(f"{where}: {sorted(unknown)} are no keys; known are {sorted(known)}")
