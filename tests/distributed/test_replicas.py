"""Copies of the target as processes: the same tokens, and every copy at work."""

from collections.abc import Callable
from typing import Any

import pytest

from specdec.certify.subject import decode_cases
from specdec.clocks import Timeline
from specdec.clocks.wall import MeasuredClock
from specdec.compose.workbench import Workbench, build
from specdec.distributed import GroupHandle
from specdec.distributed.ranks import Ranks
from specdec.executors import ReplicasExecutor
from specdec.types import Batch
from tests import toys

KEYS = {"executor.replicas": 2, "executor.transport": "distributed", "policy.lookahead": 2}
RANKS = Ranks(
    model={"kind": "random", **toys.MODEL}, clock={"kind": "measured"}, threads=1, trace=True
)


def decoded_over_processes() -> list[dict[str, Any]]:
    """Decodes, asserts plain decoding's output, and leaves while a copy is still at work."""
    clock = MeasuredClock(timeline=Timeline())
    bench = Workbench(toys.pair(), seed=toys.SEED, clock=clock, ranks=RANKS)
    parts = build("dsi", bench, **KEYS)
    executor = parts.executor
    assert isinstance(executor, ReplicasExecutor)
    wanted = toys.cases(12)[:6]
    try:
        toys.assert_plain(decode_cases(parts, wanted, batch_size=2), wanted)
        assert len({*(executor.pids or ())}) == 2
        reports = executor.reports()
        for copy in executor._copies:
            if not copy.is_busy:
                copy.start(Batch(step=1000))
        return reports
    finally:
        executor.shutdown()


@pytest.mark.distributed
def test_lossless_over_processes(keep_ranks: Callable[..., None]) -> None:
    """Tokens, reports, and processes that serve the next run although copies were still at work."""
    for number in (1, 2):
        keep_ranks(number=number)
    handles = [GroupHandle(1, threads=1, number=number) for number in (1, 2)]
    try:
        for _ in range(3):
            reports = decoded_over_processes()
            assert [report["clock"]["rank"] for report in reports] == [1, 2]
            assert sum(report["rows"] for report in reports) > 6 * 12
            spans = [span for report in reports for span in report["clock"]["spans"]]
            assert 1 in {span["rank"] for span in spans}, "the first copy is taken if it is free"
            assert all(handle.group.alive for handle in handles)
    finally:
        for handle in handles:
            handle.release()


@pytest.mark.parametrize(("preset", "keys"), [("dsi", {}), ("specpipe", {"stages": 2})])
def test_without_a_need_for_ranks_none_are_started(preset: str, keys: dict[str, Any]) -> None:
    """The workbench could start ranks, and the configuration says ``transport=in_process``."""
    bench = Workbench(toys.pair(), clock=MeasuredClock(), ranks=RANKS)
    assert not build(preset, bench, **keys).executor.distributed
