"""The reproducible tables and figures: a YAML each, ``experiments/<paper>/<item>.yaml``.

Keys of a config: ``builder`` (module:function that returns the findings), ``picture``
(module:function that draws them, for builders that do not), ``needs`` (required presets), ``size``
(quick and full: [prompts, tokens]), ``missing`` (why there is no builder), ``alone`` (true:
measures this machine's times, so nothing runs beside it), ``paced`` (rows in real time, see
``pacing``), ``fixed`` (what was fixed before the run: ``baseline`` and ``data`` as sentences,
``counts``, the drafts whose figures count, ``changes``, lines "date: what and why"), ``why``, and
the keys of the builder.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from experiments.reproduce.stated import PAPERS, ROOT, Paper, Stated, read_paper
from specdec.config.options import options
from specdec.errors import UserError
from specdec.parts.fields import did_you_mean

if TYPE_CHECKING:
    from experiments.reproduce.findings import Findings
    from experiments.reproduce.lab import Lab

_ITEM_KEYS = ("builder", "picture", "needs", "size", "missing", "alone")
_FIXED_KEYS = {"baseline", "data", "counts", "changes"}
SIZE = {"quick": (8, 48), "full": (32, 128)}
"""Default number of prompts and tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One table or figure; see the keys above.

    Attributes:
        config: keys of the builder.
        reason: why there is no builder.
    """

    paper: Paper
    name: str
    stated: Stated
    config: Mapping[str, Any]
    builder: str
    needs: tuple[str, ...]
    size: Mapping[str, tuple[int, int]]
    reason: str
    alone: bool = False
    picture: str = ""

    @property
    def id(self) -> str:
        return f"{self.paper.name}/{self.name}"

    @property
    def fixed(self) -> Mapping[str, Any]:
        """Baseline, data and counted drafts, and later changes of them."""
        return self.config.get("fixed") or {}

    @property
    def absent(self) -> list[str]:
        known = options("strategy", ())
        return [preset for preset in self.needs if preset not in known]

    @property
    def status(self) -> str:
        """ready if it tests a claim, or what is missing."""
        if self.reason:
            return f"missing: {self.reason}"
        if self.absent:
            return f"missing: preset {', '.join(self.absent)}"
        return "ready" if self.stated.claims else "figures of ours, no claim"

    def build(self, lab: Lab) -> Findings:
        """Runs the builder and appends the config's ``notes`` and ``absent`` to its findings."""
        make: Callable[[Item, Lab], Findings] = _function(self.builder)
        findings = make(self, lab)
        if self.picture:
            findings.figure = self.draw(findings)
        findings.notes += self.config.get("notes", ())
        findings.missing += self.config.get("absent", ())
        return findings

    def draw(self, findings: Findings) -> Any:
        """The picture of findings, as of ``Findings.figure``.

        Raises:
            UserError: the builder draws while it runs.
        """
        if not self.picture:
            raise UserError(
                f"{self.id} has no picture that is drawn from its stored results: run it"
                f" (specdec reproduce {self.id})"
            )
        return _function(self.picture)(self, findings)


def _function(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


@cache
def all_items(root: Path = ROOT) -> Mapping[str, Item]:
    """Every table and figure by id."""
    items = {}
    for name in PAPERS:
        if (root / name / "stated.yaml").is_file():
            paper = read_paper(name, root)
            for key, stated in paper.items.items():
                item = _item(paper, key, stated, root / name / f"{key}.yaml")
                items[item.id] = item
    return items


def choose(names: list[str], items: Mapping[str, Item]) -> list[Item]:
    """The items of these names; a paper's name stands for all of its items.

    Raises:
        UserError: an unknown name.
    """
    chosen: dict[str, Item] = {}
    for name in names:
        matching = {k: v for k, v in items.items() if k == name or v.paper.name == name}
        if not matching:
            raise UserError(f"{name} is no table or figure: {did_you_mean(name, items)}")
        chosen |= matching
    return list(chosen.values())


def _item(paper: Paper, name: str, stated: Stated, path: Path) -> Item:
    if not path.is_file():
        raise UserError(f"{paper.name}/{name} has stated values but no config: write {path.name}")
    with path.open(encoding="utf-8") as stream:
        values = yaml.safe_load(stream)
    unknown = set(values.get("fixed") or ()) - _FIXED_KEYS
    if unknown:
        raise UserError(
            f"{path.name}: fixed has {sorted(unknown)}, known are {sorted(_FIXED_KEYS)}"
        )
    size = {**SIZE, **values.get("size", {})}
    return Item(
        paper=paper,
        name=name,
        stated=stated,
        config={k: v for k, v in values.items() if k not in _ITEM_KEYS},
        builder=values.get("builder", ""),
        picture=values.get("picture", ""),
        needs=tuple(values.get("needs", ())),
        size={k: (int(v[0]), int(v[1])) for k, v in size.items()},
        reason=values.get("missing", ""),
        alone=bool(values.get("alone", False)),
    )
