"""The claims of the papers as data: ``experiments/<paper>/stated.yaml``.

A file has the paper's name and reference and the claims of each table or figure. A claim has
``text``, ``stated`` (a number, a pair [min, max], or a sentence), ``unit``, ``section`` if it
differs from the item's, ``window`` (see ``Window``), ``kind`` where the claim fixes the kind of
verdict (``findings.KINDS``) and ``mark``: original (in the available text), known (general
knowledge of the original) or reconstructed (from the sentences around a gap).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
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

_CLAIM_KEYS = {"text", "stated", "unit", "section", "mark", "window", "kind"}
_ITEM_KEYS = {"title", "section", "claims"}


KINDS = ("measured", "calibrated", "what-if", "stand-in", "input", "construction", "formula")
"""Kinds of verdicts (docs/reproduction.md); only ``COUNTED`` ones count for or against a paper."""

COUNTED = ("measured", "calibrated")


@dataclass(frozen=True, slots=True)
class Window:
    """What decides a verdict, and why.

    Attributes:
        low, high: ends of the window; None for a sentence.
        reason: why these ends; for a sentence its criterion.
    """

    low: float | None
    high: float | None
    reason: str

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return self.reason
        return f"{self.low:.4g} to {self.high:.4g}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One stated value; its fields are those of the file.

    Attributes:
        low, high: the stated range, equal for a number; None for a sentence.
        sentence: the claimed sentence; empty for numbers.
        kind: empty if each figure has its own.
    """

    id: str
    text: str
    low: float | None
    high: float | None
    sentence: str
    unit: str
    section: str
    mark: str
    window: Window
    kind: str = ""

    @property
    def ends(self) -> tuple[float, float]:
        assert self.low is not None
        assert self.high is not None
        return self.low, self.high

    @property
    def suffix(self) -> str:
        return self.unit if self.unit in ("", "x") else f" {self.unit}"

    @property
    def stated(self) -> str:
        if self.low is None or self.high is None:
            return self.sentence
        ends = dict.fromkeys(f"{end:g}" for end in self.ends)
        return f"{'-'.join(ends)}{self.suffix}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """The claims of one table or figure, by id in the order of the file."""

    title: str
    section: str
    claims: Mapping[str, Claim]


GROUPS = ("holds", "fails", "open", "untested")
"""Groups of a paper's summary; a test compares each sentence with the verdicts of its claims."""


@dataclass(frozen=True, slots=True)
class Sentence:
    """A sentence of a paper's summary and the claims that it is about, as item/claim or item."""

    text: str
    claims: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Paper:
    """The claims of one paper: tables and figures by name, and sentences by ``GROUPS``."""

    name: str
    title: str
    reference: str
    items: Mapping[str, Stated]
    summary: Mapping[str, tuple[Sentence, ...]]


def read_paper(name: str, root: Path = ROOT) -> Paper:
    """Reads one paper's stated values.

    Raises:
        UserError: an unknown key, or a value that is neither number, pair nor sentence.
    """
    path = root / name / "stated.yaml"
    with path.open(encoding="utf-8") as stream:
        values = yaml.safe_load(stream)
    items = {key: _stated(f"{path.name} {key}", value) for key, value in values["items"].items()}
    return Paper(
        name=name,
        title=values["title"],
        reference=values["reference"],
        items=items,
        summary=_summary(path.name, values.get("summary") or {}),
    )


def _summary(where: str, values: Mapping[str, Any]) -> dict[str, tuple[Sentence, ...]]:
    _refuse_unknown(f"{where} summary", values, set(GROUPS))
    return {
        group: tuple(Sentence(text.strip(), tuple(claims)) for text, *claims in sentences)
        for group, sentences in values.items()
    }


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
    kind = values.get("kind", "")
    if kind and kind not in KINDS:
        raise UserError(f"{where}: kind={kind} is not one of {', '.join(KINDS)}")
    low, high, sentence = _value(where, values["stated"])
    return Claim(
        **{"id": key, "text": values["text"], "low": low, "high": high, "sentence": sentence},
        **{key: str(values.get(key, other)) for key, other in (("unit", ""), ("section", section))},
        **{"mark": mark, "window": _window(where, low, high, values.get("window")), "kind": kind},
    )


@cache
def own_yaml(name: str) -> Any:
    """The content of a YAML file beside this module."""
    return yaml.safe_load(Path(__file__).with_name(name).read_text(encoding="utf-8"))


def known_windows() -> Mapping[str, Mapping[str, Any]]:
    windows: Mapping[str, Mapping[str, Any]] = own_yaml("windows.yaml")
    return windows


def _window(where: str, low: float | None, high: float | None, given: Any) -> Window:
    """The window of a claim: the rule of ``windows.yaml``, a named one, or its own.

    A sentence needs its criterion as text; an own window has ``ends`` or ``within``, and
    ``reason``.
    """
    if low is None or high is None:
        if not isinstance(given, str) or not given:
            raise UserError(f"{where}: window must say what decides this sentence")
        return Window(None, None, given)
    if given is None:
        given = "figure" if low == high else "range"
    if isinstance(given, str):
        if given not in known_windows():
            raise UserError(f"{where}: window={given} is not one of {', '.join(known_windows())}")
        given = known_windows()[given]
    if not given.get("reason") or not set(given) <= {"ends", "within", "reason"}:
        raise UserError(f"{where}: window={given} needs ends or within, and its reason")
    if "ends" in given:
        low, high = map(float, given["ends"])
        return Window(low, high, given["reason"])
    slack = float(given["within"])
    return Window(low - abs(low) * slack, high + abs(high) * slack, given["reason"])


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
