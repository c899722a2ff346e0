"""Rows of a trained EAGLE head in the papers' figures, beside the traced ones."""

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.pipelines.token_times import COLUMNS, tbt
from experiments.reproduce.items import all_items
from experiments.reproduce.lab import Lab

pytestmark = pytest.mark.slow

ROW = "EAGLE-3, bundled head"


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
