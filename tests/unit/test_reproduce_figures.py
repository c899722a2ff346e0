"""Intervals, schedules and pictures of ``specdec reproduce``, on made-up results."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from experiments.pipelines.schedule import _facts
from experiments.reproduce.intervals import beside, hits_of, interval, share
from experiments.reproduce.stated import ROOT
from specdec.cli.main import BAD_INPUT, main
from specdec.metrics import RequestResult
from specdec.metrics.counters import RequestCounters
from tests.states import new_result


def test_an_interval_spans_what_prompts_differ_by() -> None:
    """Equal prompts give a point, one prompt none; where they differ the pooled value is inside."""
    low, high = interval([(3, 4)] * 5, share)
    assert low == high == 0.75
    assert interval([(3, 4)], share) == (None, None)
    rows = [(1, 10), (9, 10), (5, 10), (6, 10), (2, 10)]
    low, high = interval(rows, share)
    assert low is not None
    assert high is not None
    assert 0.1 < low < 23 / 50 < high < 0.9


def result(request_id: int, hits: int) -> RequestResult:
    return new_result(request_id, RequestCounters(answers=10, hits=hits, misses=10 - hits))


def test_runs_are_paired_by_prompt_not_by_place() -> None:
    left = [result(2, 3), result(7, 8)]
    right = [result(7, 1), result(9, 5), result(2, 6)]
    assert beside(left, right, hits_of) == [(3, 10, 6, 10), (8, 10, 1, 10)]


def step(number: int, rows: dict[int, int]) -> list[dict[str, Any]]:
    """A step of 10 us: every rank works from 10 * number on, then prunes."""
    events = [
        {"tid": rank, "cat": "compute", "ts": 10.0 * number, "dur": 8.0, "args": {"tokens": num}}
        for rank, num in rows.items()
    ]
    return events + [
        {"tid": rank, "cat": "prune", "ts": 10.0 * number + 8, "dur": 2.0, "args": {"tokens": 9}}
        for rank in (1, 2)
    ]


def test_a_schedule_is_held_against_every_line() -> None:
    """Two stages: the second gets what survived; each defect is seen by its own line alone."""
    good = {0: step(0, {1: 4, 2: 1}), 1: step(1, {1: 4, 2: 2}), 2: step(2, {1: 4, 2: 4})}
    summary = {"answers": 3}

    def counts(steps: dict[int, list[dict[str, Any]]], answers: int = 3) -> dict[str, bool]:
        found = _facts(steps, {"answers": answers})
        return {claim: held == of for claim, (held, of, _) in found.items()}

    assert all(counts(good).values())
    assert _facts(good, summary)["forward"][1] == 2
    grown = {**good, 2: step(2, {1: 4, 2: 5})}
    assert counts(grown) == {"stages": True, "token": True, "prune": True, "forward": False}
    assert not counts(good, answers=4)["token"]
    late = {**good, 1: [{**event, "ts": event["ts"] + 5} for event in good[1]]}
    assert not counts(late)["stages"]
    one_rank = {**good, 1: [e for e in good[1] if (e["tid"], e["cat"]) != (2, "prune")]}
    assert not counts(one_rank)["prune"]


@pytest.mark.slow
def test_a_stored_picture_is_drawn_again_without_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the results that are checked in; an item whose builder draws says to run it."""
    stored = ROOT / "specpipe" / "results"
    folder = tmp_path / "specpipe" / "results"
    folder.mkdir(parents=True)
    for name in ("fig11", "fig14"):
        shutil.copy(stored / f"{name}.json", folder)
    words = ["reproduce", "--redraw", f"output_dir={tmp_path}"]
    assert main([*words, "specpipe/fig11"]) == 0
    (path,) = capsys.readouterr().out.splitlines()
    assert Path(path).read_bytes().startswith(b"\x89PNG")
    assert main([*words, "specpipe/fig14"]) == BAD_INPUT
    assert "run it (specdec reproduce specpipe/fig14)" in capsys.readouterr().err
    assert main([*words, "specpipe/fig13"]) == BAD_INPUT
    assert "has no results in" in capsys.readouterr().err
