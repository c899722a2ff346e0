"""A free-running draft beside ranks: both sides signal the waiting loop."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any

import pytest

from specdec.certify.subject import decode_cases
from specdec.clocks.wall import PacedClock
from specdec.compose.planned import planned
from specdec.compose.workbench import Workbench
from specdec.distributed.group import RankGroup
from specdec.distributed.ranks import Ranks
from specdec.errors import RankFailure
from specdec.executors import PipelineExecutor
from specdec.sources import DraftModelSource
from specdec.sources.background import Background
from specdec.types import EventKind
from specdec.verifiers import MatchVerifier
from tests import toys
from tests.distributed.fake_ranks import thread_ranks
from tests.toys import FreeRunning


def decoded(clock: dict[str, Any], *, stages: int, batch_size: int) -> FreeRunning:
    """Decodes over ranks and asserts that the output is plain decoding's."""
    ranks = Ranks(model={"kind": "random", **toys.MODEL}, clock=clock, threads=1)
    own = PacedClock(toys.profile(4.0, 3.0)) if clock["kind"] == "paced" else None
    bench = Workbench(toys.pair(), seed=toys.SEED, clock=own, ranks=ranks)
    executor = planned(PipelineExecutor, toys.pair(), stages=stages, transport="distributed")
    policy = FreeRunning()
    source = Background(
        source=DraftModelSource(runner=bench.draft_runner()), free_rank=executor.plan.num_ranks + 1
    )
    parts = bench.parts(source=source, policy=policy, verifier=MatchVerifier(), executor=executor)
    wanted = toys.cases(12)
    try:
        toys.assert_plain(decode_cases(parts, wanted, batch_size=batch_size), wanted)
    finally:
        parts.executor.shutdown()
    return policy


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "batch_size"), [(1, 1), (1, 3), (3, 3)])
@pytest.mark.parametrize("kind", ["measured", "paced"])
def test_lossless_beside_ranks(kind: str, stages: int, batch_size: int) -> None:
    """Ranks are threads here."""
    clock: dict[str, Any] = {"kind": kind}
    if kind == "paced":
        costs = {
            "stage": {"tokens": [1], "ms": [4.0]},
            "draft": {"tokens": [1], "ms": [3.0]},
        }
        clock |= {"profile": "toy", "scale": 1.0, "costs": costs}
    with thread_ranks(stages + 1):
        policy = decoded(clock, stages=stages, batch_size=batch_size)
    assert policy.log.count(EventKind.DRAFT) > 5


@pytest.mark.distributed
def test_lossless_beside_processes(keep_ranks: Callable[..., None]) -> None:
    keep_ranks(2)
    assert decoded({"kind": "measured"}, stages=2, batch_size=3).log.count(EventKind.DRAFT) > 5


@pytest.mark.distributed
def test_a_wait_for_events_ends_when_ranks_are_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 sees no reply, as if the ranks were stuck; the limit of ``collect`` holds here too."""
    ranks = Ranks(
        model={"kind": "random", **toys.MODEL},
        clock={"kind": "measured"},
        threads=1,
        timeout_s=1.0,
    )
    bench = Workbench(toys.pair(), seed=toys.SEED, ranks=ranks)
    source = DraftModelSource(runner=bench.draft_runner())
    parts = bench.parts(source=source, policy=FreeRunning(), verifier=MatchVerifier(), stages=2)
    monkeypatch.setattr(RankGroup, "has_reply", lambda _group, _key: False)
    start = monotonic()
    try:
        with pytest.raises(RankFailure, match=r"nothing has moved for executor\.timeout_s=1 s"):
            decode_cases(parts, toys.cases(12)[:1])
    finally:
        parts.executor.shutdown()
    assert monotonic() - start < 20.0
