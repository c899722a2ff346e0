"""Rows of a trained EAGLE head in the papers' figures, beside the traced ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.pipelines.token_times import COLUMNS, tbt
from experiments.reproduce.findings import kind_of
from experiments.reproduce.items import all_items
from experiments.reproduce.lab import Lab
from experiments.reproduce.stated import COUNTED

pytestmark = pytest.mark.slow

ROW = "EAGLE-3, bundled head"
ITEMS = ("specpipe/fig11", "specpipe/fig13", "swiftspec/fig7")


@pytest.mark.usefixtures("data_dir")
def test_a_head_runs_beside_rows_of_the_same_tokens(tmp_path: Path) -> None:
    item = all_items()["specpipe/fig11"]
    head = {**item.config["heads"][ROW], "drafts": ["head_t06"]}
    config = {key: item.config[key] for key in ("common", "rows")}
    config |= {"drafts": [], "heads": {ROW: head}}
    small = replace(item, config=config, size={"quick": (2, 6), "full": (2, 6)})
    findings = tbt(small, Lab(folder=tmp_path, quick=True))
    (table,) = findings.tables
    rows = {row[1]: dict(zip(COLUMNS, row, strict=True)) for row in table.rows}
    assert list(rows) == ["PP", "SpecPipe", ROW]
    assert len({row["tokens"] for row in rows.values()}) == 1
    assert rows[ROW]["draft passes/token"] >= 1.0
    assert 20 < rows[ROW]["nodes/pass"] <= 60  # EAGLE-2's tree, cut at the sixth token
    found = {measure.claim: measure for measure in findings.measures}
    ratio = rows[ROW]["TBT ms"] / rows["SpecPipe"]["TBT ms"]
    assert found["over_eagle3"].value == pytest.approx(ratio)
    assert found["over_eagle3"].low <= ratio <= found["over_eagle3"].high  # type: ignore[operator]
    assert found["eagle3_over_pp"].value == pytest.approx(
        rows["PP"]["TBT ms"] / rows[ROW]["TBT ms"]
    )


@pytest.mark.parametrize("name", ITEMS)
def test_the_rows_are_stand_ins_and_say_so(name: str) -> None:
    item = all_items()[name]
    assert {"EAGLE3", ROW} <= {*item.config["chains"], *item.config["heads"]}
    note = next(note for note in item.config["notes"] if ROW in note)
    assert "stand-in" in note
    assert "7M target" in note
    for draft in item.config["heads"][ROW]["drafts"]:
        from experiments.reproduce.drafts import known_drafts

        assert not known_drafts()[draft].get("calibrated")
        assert "bundled" in known_drafts()[draft]["title"]


@pytest.mark.parametrize("name", ITEMS)
def test_stored_results_have_them(name: str) -> None:
    from experiments.reproduce.results import read_item

    item = all_items()[name]
    stored = read_item(item)
    assert stored is not None
    findings = stored[0]
    rows = {row[1] for table in findings.tables for row in table.rows}
    assert {"EAGLE3", ROW} <= rows
    ours = [m for m in findings.measures if "its EAGLE-3 head" in m.conditions]
    claims = item.stated.claims
    assert {m.claim for m in ours} == set(item.config["heads"][ROW].get("ratios", {}))
    assert all(kind_of(claims[m.claim], m) not in COUNTED for m in ours)
