"""What benchmarks compute from the times that they have measured."""

import numpy as np
import pytest

from experiments.benchmarks import drift, session_bound
from experiments.benchmarks.session_bound import Call, Row


def _decoded(speed_at, minutes: float = 8.0):
    """Prompts of 60 tokens that begin every second, decoded at ``speed_at(second)`` tokens/s."""
    at = np.arange(60.0 * minutes)
    return np.stack([at, 60.0 / speed_at(at), np.full(len(at), 60.0)], axis=1)


def test_drift_finds_how_often_a_speed_is_near_a_later_one():
    steady = drift.report(_decoded(lambda at: np.full(len(at), 100.0)))
    assert all(line.count("100 % within 10 %, sd 0 %") == 3 for line in steady[2:])
    # Two minutes of 100 and 120 tokens/s in turn: never near after two minutes, always after four.
    turns = drift.report(_decoded(lambda at: np.where(at // 120 % 2, 120.0, 100.0)))
    cells = [line.split(" | ") for line in turns[2:]]
    assert [cell[2].startswith("0 % within") for cell in cells] == [True] * 3
    assert [cell[4].startswith("100 % within") for cell in cells] == [True] * 3


def test_drift_counts_tokens_and_seconds_of_a_window_together():
    found = np.array([[0.0, 1.0, 60.0], [5.0, 3.0, 60.0], [20.0, 1.0, 40.0], [40.0, 9.0, 1.0]])
    assert drift.speeds(found, 15).tolist() == [30.0, 40.0]


def test_session_times_are_those_from_a_call_to_the_next():
    target, draft = 1, 2
    row = Row()
    row.add([Call(target, 0.0, 2.0, 2.5), Call(draft, 3.0, 1.0, 4.0), Call(target, 4.2, 2.0, 6.2)])
    assert row.session_s == pytest.approx(5.0)
    assert row.after[target] == pytest.approx([0.5])  # a flush between them is left out
    assert row.after[draft] == pytest.approx([0.2])


def test_the_share_of_plain_decoding_is_of_the_same_run(capsys):
    plain, other = Row(tokens=100, passes=100, seconds=2.0), Row(tokens=90, passes=30, seconds=1.0)
    plain.session_s, plain.in_session[1], plain.after[1] = 1.0, 1.0, [1e-4]
    session_bound._print({"ar": plain, "ort_draft": other})
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["ar", "1.00", "50", "1.00", "100", "1.00", "100"]
    assert lines[2].split() == ["ort_draft", "3.00", "90", "1.80"]
