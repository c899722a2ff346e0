"""Acceptance under engines' keys: ``specdec fit`` reads what was counted."""

from pathlib import Path

import numpy as np
import pytest

from specdec.cli.main import main
from specdec.fitting.logs import read_log
from specdec.metrics.counters import RequestCounters
from specdec.metrics.rates import speculative_decoding
from specdec.report.results import read_requests

WORDS = ["model=random", "model.draft_layers=3", "data.limit=3", "max_new_tokens=24"]


def counted(depths: list[int], verified: list[int], proposed: int) -> RequestCounters:
    counters = RequestCounters(proposed=proposed)
    for depth, judged in zip(depths, verified, strict=True):
        counters.count_answer(depth, judged, hit=False)
    return counters


def test_definitions_on_hand_computed_requests() -> None:
    first = counted([2, 0, 1], [3, 1, 2], proposed=9)
    second = counted([3], [3], proposed=3)
    assert speculative_decoding(first, whole_tree=True, each_step=True) == {
        "mean_acceptance_length": 2.0,
        "draft_acceptance_rate": 3 / 9,
        "acceptance_histogram": [1, 1, 1],
        "num_spec_steps": 3,
        "num_accepted_draft_tokens": 3,
        "num_draft_tokens": 9,
        "num_spec_tokens": 3,
        "per_step_accepted": [2, 0, 1],
    }
    both = speculative_decoding(RequestCounters.sum([first, second]), whole_tree=True)
    assert both is not None
    assert both["acceptance_histogram"] == [1, 1, 1, 1]
    assert both["draft_acceptance_rate"] == 6 / 12
    assert "per_step_accepted" not in both
    plain = counted([0, 0], [0, 0], proposed=0)
    assert speculative_decoding(plain, whole_tree=True) is None
    assert speculative_decoding(first, whole_tree=False) is None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    assert main(["run", "strategy=speculative", *WORDS, f"output_dir={folder}"]) == 0
    return folder


def test_fit_reads_each_request_as_it_was_counted(folder: Path) -> None:
    records = read_requests(folder / "requests.jsonl")
    log = read_log(folder / "requests.jsonl")
    assert len(log.requests) == len(records) == 3
    for found, record in zip(log.requests, records, strict=True):
        counters = record.result.counters
        assert found.ordered
        assert found.accepted.tolist() == [length - 1 for length in counters.decided]
        lengths, numbers = np.unique(found.accepted + 1, return_counts=True)
        assert dict(zip(lengths.tolist(), numbers.tolist(), strict=True)) == counters.path_lengths
    assert sum(int(r.accepted.sum()) for r in log.requests) > 0
