"""The formulas of ``experiments.pipelines`` against the simulator and against hand counts."""

from pathlib import Path

import pytest

from experiments.pipelines.theory import (
    DecodeCounts,
    decode_counts,
    implied_tbt_ms,
    needed_acceptance_length,
)
from experiments.reproduce.lab import Lab
from specdec.clocks import CostCurve, LatencyProfile
from specdec.clocks.build import build_profile

PROFILE = LatencyProfile(
    name="test",
    costs={
        "stage": CostCurve(tokens=(1, 11), ms=(10.0, 20.0)),
        "draft": CostCurve(tokens=(1,), ms=(4.0,)),
        "prune": CostCurve(tokens=(1,), ms=(2.0,)),
        "transfer": CostCurve(tokens=(1,), ms=(1.0,)),
    },
)


def test_counts_by_hand() -> None:
    """12 steps of 15 + 1 ms, 5 prunes of 2 ms and 3 passes of 4 ms the target waits for."""
    counts = DecodeCounts(tokens=8, answers=5, steps=12, rows=6.0, beside=1, between=3.0)
    assert implied_tbt_ms(counts, PROFILE) == pytest.approx((12 * 16 + 5 * 2 + 3 * 4) / 8)
    slow_draft = DecodeCounts(tokens=8, answers=5, steps=12, rows=6.0, beside=5)
    assert implied_tbt_ms(slow_draft, PROFILE) == pytest.approx((12 * 21 + 5 * 2) / 8)
    assert needed_acceptance_length(22.0, 1.0, 4, PROFILE) == pytest.approx(46 / 22)


PIPELINE = ("executor=pipeline", "executor.stages=8", "clock.profile=specpipe_8x3090")
SPECINFER = ("strategy=specinfer", *PIPELINE)  # eight levels, a draft pass each
ROWS = {  # overrides; draft passes beside a step, and for which the target waits
    "ar": (("strategy=ar", *PIPELINE), {}),
    "by rule": ((*SPECINFER, "policy.draft_overlap=rule"), {"between_hit": 1, "between_miss": 8}),
    "specpipe": (("strategy=specpipe", *PIPELINE), {"beside": 1}),
    "best first": (("strategy=specpipe_bf", *PIPELINE), {"beside": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
def test_the_simulator_agrees_with_counts_and_profile(row: str, tmp_path: Path) -> None:
    """Within 5 % for every row; the row is then read back instead of run again."""
    overrides, passes = ROWS[row]
    lab = Lab(folder=tmp_path, quick=True)
    small = ("clock=simulated", "model=synthetic", "data.limit=3", "max_new_tokens=48")
    found = lab.run([*small, *overrides])
    counts = decode_counts(found.results, found.totals, **passes)  # type: ignore[arg-type]
    implied = implied_tbt_ms(counts, build_profile(found.config["clock"]))
    assert found.tbt_ms == pytest.approx(implied, rel=0.05)
    path = found.folder / "requests.jsonl"
    written = path.stat().st_mtime_ns
    assert lab.run([*small, *overrides]).tbt_ms == found.tbt_ms
    assert path.stat().st_mtime_ns == written
