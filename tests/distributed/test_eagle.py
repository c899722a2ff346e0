"""EAGLE heads over ranks: features come from several of them, and all figures are those of one.

Ranks are threads here, with the transport of processes.
"""

from collections.abc import Callable
from typing import Any

import pytest

from specdec.certify.subject import decode_cases
from specdec.compose.workbench import Workbench, planned
from specdec.distributed.executor import DistributedExecutor
from specdec.distributed.ranks import Ranks
from specdec.executors import PipelineExecutor
from specdec.interfaces import TreePolicy
from specdec.metrics.counters import SourceCounters
from specdec.policies import BestFirst, FixedWidth, Static
from specdec.sources import EagleSource
from specdec.verifiers import MatchVerifier
from tests import eagle, toys
from tests.distributed.fake_ranks import thread_ranks

CASES = toys.cases(12)[::2]
LAYOUTS: dict[str, tuple[Callable[[], TreePolicy], dict[str, Any], bool]] = {
    "trees over four stages": (lambda: Static(branching=[3, 2, 1]), {"stages": 4}, False),
    "levels over four stages": (lambda: FixedWidth(width=4, children=3), {"stages": 4}, False),
    "levels, early states": (lambda: FixedWidth(width=4, children=3), {"stages": 4}, True),
    "drafting while one rank verifies": (
        lambda: BestFirst(bs=6, w=3, d=2, asynchronous=True),
        {"stages": 1},
        False,
    ),
}


def decoded(name: str, *, over_ranks: bool) -> tuple[int, SourceCounters]:
    """Accepted tokens and the head's work; asserts that the output is plain decoding's."""
    policy, layout, early = LAYOUTS[name]
    ranks = None
    if over_ranks:
        model = {"kind": "random", **toys.MODEL}
        ranks = Ranks(model=model, clock={"kind": "measured"}, threads=1)
    bench = Workbench(eagle.Pair(eagle.trained_head(3)), seed=toys.SEED, ranks=ranks)
    pair = bench.pair.without_target() if over_ranks else bench.pair
    source = EagleSource(pair=pair, meter=bench.meter, early=early)
    transport = "distributed" if over_ranks else "in_process"
    parts = bench.parts(
        source=source,
        policy=policy(),
        verifier=MatchVerifier(),
        executor=planned(PipelineExecutor, bench.pair, transport=transport, **layout),
    )
    assert isinstance(parts.executor, DistributedExecutor) == over_ranks
    try:
        found = decode_cases(parts, CASES, batch_size=2, prefill_chunk=4)
    finally:
        parts.executor.shutdown()
    toys.assert_plain(found, CASES)
    return sum(one.accepted for one in found.values()), source.counters


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_over_ranks_is_that_of_one_process(name: str) -> None:
    """Tokens, accepted tokens, passes, rows and corrected entries."""
    with thread_ranks(5):
        accepted, counters = decoded(name, over_ranks=True)
    assert (accepted, counters) == decoded(name, over_ranks=False)
    assert accepted > 15
    assert counters.catch_up_rows > 15
