"""Strategies whose draft works beside the target, with groups of several ranks for both."""

from collections.abc import Callable
from typing import Any

import pytest

from specdec.certify.subject import decode_cases
from specdec.clocks import Timeline
from specdec.clocks.wall import MeasuredClock
from specdec.compose.workbench import Workbench, build
from specdec.distributed.executor import DistributedExecutor
from specdec.distributed.ranks import Ranks
from tests import toys
from tests.sampled import checkered

pytestmark = pytest.mark.distributed

GROUPS: dict[str, dict[str, Any]] = {
    "3 + 2 ranks": {"executor.target_degree": 3, "executor.draft_degree": 2},
    "4 stages": {"executor.stages": 4, "executor.target_degree": 1, "executor.draft_degree": 1},
}


@pytest.mark.parametrize(
    ("preset", "groups"), checkered(["pearl", "ssd", "amusd", "swiftspec"], [*GROUPS])
)
def test_lossless_and_traced(preset: str, groups: str, keep_ranks: Callable[..., None]) -> None:
    """The trace has the work of every rank, the draft's followers included."""
    keep_ranks()
    keys = {**GROUPS[groups], "executor.transport": "distributed"}
    ranks = Ranks(
        model={"kind": "random", **toys.MODEL}, clock={"kind": "measured"}, threads=1, trace=True
    )
    clock = MeasuredClock(timeline=Timeline())
    bench = Workbench(toys.pair(), seed=toys.SEED, clock=clock, ranks=ranks)
    parts = build(preset, bench, **keys)
    executor = parts.executor
    assert isinstance(executor, DistributedExecutor)
    wanted = toys.cases(12)[:6]
    try:
        toys.assert_plain(decode_cases(parts, wanted, batch_size=2), wanted)
        stages, followers = executor.reports(), executor.draft_reports()
    finally:
        executor.shutdown()
    num = keys["executor.target_degree"] * keys.get("executor.stages", 1)
    assert [report["clock"]["rank"] for report in stages] == list(range(1, num + 1))
    assert len(followers) == keys["executor.draft_degree"] - 1
    for report in followers:
        assert report["clock"]["rank"] == num + 1
        spans = report["clock"]["spans"]
        assert len(spans) > 10
        assert {span["kind"] for span in spans} == {"draft"}
        assert all(span["seconds"] > 0 for span in spans)
        assert max(span["step"] for span in spans) > 5  # turns of the loop
