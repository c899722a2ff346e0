"""Recording and replaying from configuration to run folder."""

import json
from pathlib import Path
from typing import Any

import pytest

from specdec.config.job import compose_comparison, run_job_of
from specdec.pairs.record import read_record
from specdec.report.results import read_requests
from specdec.runs.jobs import compare_jobs, run_job
from specdec.runs.progress import Progress

pytestmark = pytest.mark.slow

SMALL = (
    "model=random",
    "model.num_layers=2",
    "model.hidden_size=16",
    "model.num_heads=2",
    "data.limit=2",
    "max_new_tokens=12",
)
COUNTS = ("target_passes", "draft_passes", "acceptance_length", "steps_per_token", "proposed")


def ran(folder: Path, *words: str) -> dict[str, Any]:
    folder.mkdir()
    run_job(run_job_of(words).config, folder, Progress())
    return json.loads((folder / "summary.json").read_text("utf-8"))


def results(folder: Path):
    return [record.result for record in read_requests(folder / "requests.jsonl")]


def test_recording_changes_nothing_and_is_replayed_from_the_run_folder(tmp_path) -> None:
    bare, with_record = tmp_path / "bare", tmp_path / "with_record"
    before = ran(bare, *SMALL, "sampling=t08")
    after = ran(with_record, *SMALL, "sampling=t08", "record=true")
    assert not (bare / "record.npz").exists()
    assert {k: after.get(k) for k in COUNTS} == {k: before.get(k) for k in COUNTS}
    for a, b in zip(results(with_record), results(bare), strict=True):
        assert (a.output, a.counters) == (b.output, b.counters)

    about = read_record(with_record / "record.npz").about
    assert about["sampling"] == "t08"
    assert about["strategy"] == "speculative"
    assert about["provenance"]["versions"]

    summary = ran(
        tmp_path / "again",
        "model=replay",
        f"model.record={with_record / 'record.npz'}",
        "strategy=specpipe",
        "clock=simulated",
        "data.limit=1",
    )
    assert "approximation" in summary["conditions"]["replay"]
    assert summary["conditions"]["sampling"] == "t08"
    assert summary["conditions"]["record"]["seed"] == 0
    assert summary["loop_share"] == after["loop_share"]
    (again,) = results(tmp_path / "again")
    assert (again.id, len(again.output)) == (0, len(results(with_record)[0].output))


def test_a_resumed_run_records_the_prompts_of_before(tmp_path) -> None:
    """The record is made of all finished requests, whichever process finished them."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    ran(whole, *SMALL, "record=true")
    resumed.mkdir()
    lines = (whole / "requests.jsonl").read_text("utf-8").splitlines()
    (resumed / "requests.jsonl").write_text(lines[0] + "\n", encoding="utf-8")
    run_job(run_job_of([*SMALL, "record=true"]).config, resumed, Progress())
    a, b = (read_record(folder / "record.npz") for folder in (whole, resumed))
    assert [r.ranks.tolist() for r in a.requests] == [r.ranks.tolist() for r in b.requests]


def test_a_comparison_records_its_first_row(tmp_path) -> None:
    rows = compose_comparison(["strategies=[ar,speculative]", *SMALL, "record=true"])
    compare_jobs([job.config for job in rows.jobs], tmp_path, 1, Progress())
    record = read_record(tmp_path / "record.npz")
    assert record.about["strategy"] == "ar"
    assert [r.num_output for r in record.requests] == [12, 12]
