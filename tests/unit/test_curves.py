"""Curves over batch sizes: what is composed, the ratios, and where curves cross."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.pipelines.batch_curves import (
    add_ratios,
    crossovers,
    curves_markdown,
    curves_png,
)
from specdec.cli.compare import compose_curves
from specdec.metrics import RunTotals, summarise
from strategies.specpipe_db import AdaptiveWidth
from tests.unit.test_metrics import make_result

WORDS = ["strategies=[ar,specpipe_db]", "executor.stages=8", "clock=simulated", "data.limit=2"]


@pytest.mark.slow
def test_rows_replay_one_record_and_ar_runs_once_more_elsewhere() -> None:
    found = compose_curves([4, 1], WORDS, Path("here"))
    assert found.sizes == (1, 4)
    assert found.record is not None
    assert found.record.config["record"]
    assert found.record.config["clock"]["kind"] == "measured"
    rows = found.rows(4)
    names = [row["strategy"]["name"] for row in rows]
    assert names == ["ar", "specpipe_db", "ar on vllm_8x3090"]
    assert {row["batch_size"] for row in rows} == {4}
    assert {row["model"]["record"] for row in rows} == {str(Path("here/record/record.npz"))}
    profiles = [row["clock"]["profile"] for row in rows]
    assert profiles == ["specpipe_8x3090", "specpipe_8x3090", "vllm_8x3090"]
    feeding = [row["serving"]["feeding"] for row in rows]
    assert feeding == ["micro_batches", "dynamic", "micro_batches"]


def _row(name: str, size: int, speed: float, tbt: float) -> dict[str, Any]:
    return {
        "strategy": name,
        "batch_size": size,
        "throughput_tokens_per_s": speed,
        "tbt_ms_mean": tbt,
        "tbt_ms_p99": 2 * tbt,
        "loop_share": 0.1,
    }


def test_ratios_and_crossovers() -> None:
    rows = [
        *(_row("ar", n, 10.0 * n, 100.0) for n in (1, 2, 4)),
        *(_row("specpipe", n, s, 50.0 * n) for n, s in ((1, 20.0), (2, 25.0), (4, 30.0))),
        *(_row("specpipe_db", n, 20.0 * n, 50.0) for n in (1, 2, 4)),
        *(_row("elsewhere", n, 15.0 * n, 75.0) for n in (1, 2, 4)),
    ]
    add_ratios(rows, "elsewhere")
    assert [r["throughput_over_ar"] for r in rows[3:6]] == [2.0, 1.25, 0.75]
    assert [r["tbt_over_ar"] for r in rows[3:6]] == [2.0, 1.0, 0.5]
    assert rows[8]["throughput_over_cross"] == pytest.approx(80 / 60)
    assert crossovers(rows, "elsewhere") == {
        "specpipe behind ar": 4,
        "specpipe_db behind ar": None,
        "specpipe behind elsewhere": 2,
        "specpipe_db behind elsewhere": None,
    }
    page = curves_markdown(rows, {"clock": "simulated"}, "elsewhere")
    assert "`elsewhere` is cross-profile" in page
    assert "batch 4, throughput: 2.00x over ar on the same profile, 1.33x cross-profile" in page
    assert "cross-profile; the paper 1.64-2.08x over PP-vLLM" in page
    assert curves_png(rows, {"clock": "simulated"})[:4] == b"\x89PNG"


def test_step_times_are_fitted_where_there_is_no_profile() -> None:
    policy, sizes = AdaptiveWidth(width=64, children=1), np.array([0, 30])
    assert len({*policy._step_times(sizes).tolist()}) == 1  # nothing is known: flat
    for nodes in (4, 20, 8, 40, 12):
        policy._fitted.add(nodes, 0.01 + 0.001 * nodes)
    assert policy._step_times(sizes) == pytest.approx([0.01, 0.04])


def test_percentiles_over_requests_are_of_their_own_means() -> None:
    """A request whose gaps are 1 and 3 s counts as one of 2 s; one without a second token not."""
    one = [make_result([[1], [2], [3]], times=[0.0, gap, 4.0]) for gap in [1.0] * 60 + [2.0] * 40]
    slow = make_result([[1], [2]], times=[0.0, 7.0])
    single = make_result([[1]], times=[9.0])
    found = summarise([*one, slow, single], RunTotals())
    assert found["tbt_ms_p99"] == 3000.0, "a hundred of two hundred and one gaps are 2 or 3 s"
    assert found["tbt_ms_request_p99"] == 2000.0
    slower = summarise([slow] * 3 + one, RunTotals())
    assert slower["tbt_ms_request_p99"] == 7000.0
