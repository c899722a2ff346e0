"""Results on disk: ``<folder>/<paper>/results/<item>`` as .md, .csv, .json and .png."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.reproduce.findings import Findings, from_json, to_json
from experiments.reproduce.items import Item
from experiments.reproduce.rendering import csv_text, markdown
from experiments.reproduce.stated import ROOT
from specdec.files import write_bytes, write_json, write_text


def write_item(item: Item, findings: Findings, out: Path, conditions: Mapping[str, Any]) -> None:
    folder = out / item.paper.name / "results"
    write_text(folder / f"{item.name}.md", markdown(item, findings, conditions))
    write_text(folder / f"{item.name}.csv", csv_text(item, findings))
    write_json(folder / f"{item.name}.json", {**to_json(findings), "conditions": conditions})
    if findings.figure is not None:
        write_picture(item, findings.figure, out)
    else:
        (folder / f"{item.name}.png").unlink(missing_ok=True)


def write_picture(item: Item, figure: Any, out: Path) -> Path:
    """Writes the picture of one item, see ``Findings.figure``; returns its path."""
    from experiments.reproduce.drawing import as_png

    return write_bytes(out / item.paper.name / "results" / f"{item.name}.png", as_png(figure))


def read_item(item: Item, root: Path = ROOT) -> tuple[Findings, dict[str, Any]] | None:
    """Findings and conditions of a results folder; None if the item has no results."""
    path = root / item.paper.name / "results" / f"{item.name}.json"
    if not path.is_file():
        return None
    values = json.loads(path.read_text(encoding="utf-8"))
    return from_json(values), values["conditions"]
