"""Strategies whose draft works beside the target, over ranks: the same tokens on every clock."""

from collections.abc import Callable
from itertools import product
from time import monotonic
from typing import Any

import pytest

from specdec.certify.subject import decode_cases
from specdec.clocks import Timeline
from specdec.clocks.wall import MeasuredClock, PacedClock
from specdec.compose.workbench import Workbench, build
from specdec.distributed.group import RankGroup
from specdec.distributed.ranks import Ranks
from specdec.errors import RankFailure
from tests import toys
from tests.distributed.fake_ranks import thread_ranks
from tests.sampled import sampled

pytestmark = pytest.mark.slow

PRESETS = ("pearl", "ssd", "amusd", "pipeinfer", "flowspec")
CLOCKS: dict[str, dict[str, Any]] = {
    "measured": {"kind": "measured"},
    "paced": {
        "kind": "paced",
        "profile": "toy",
        "scale": 1.0,
        "costs": {
            "stage": {"tokens": [1], "ms": [4.0]},
            "draft": {"tokens": [1], "ms": [2.0]},
        },
    },
}


def decoded(preset: str, kind: str, stages: int, batch_size: int) -> Timeline:
    """Decodes over ranks, asserts that the output is plain decoding's; spans of rank 0."""
    timeline = Timeline()
    clock = (
        PacedClock(toys.profile(4.0, 2.0), timeline=timeline)
        if kind == "paced"
        else MeasuredClock(timeline=timeline)
    )
    ranks = Ranks(model={"kind": "random", **toys.MODEL}, clock=CLOCKS[kind], threads=1)
    bench = Workbench(toys.pair(), seed=toys.SEED, clock=clock, meter=None, ranks=ranks)
    keys = {"executor.stages": stages, "executor.transport": "distributed"}
    parts = build(preset, bench, **keys)
    wanted = toys.cases(12)[::2] + toys.cases(12)[-1:]  # every sampling
    try:
        toys.assert_plain(decode_cases(parts, wanted, batch_size=batch_size), wanted)
    finally:
        parts.executor.shutdown()
    return timeline


@pytest.mark.parametrize(
    ("preset", "kind", "sizes"), sampled(product(PRESETS, CLOCKS, [(1, 1), (3, 3)]), every=3)
)
def test_lossless_beside_ranks(preset: str, kind: str, sizes: tuple[int, int]) -> None:
    """Ranks are threads here."""
    stages, batch_size = sizes
    with thread_ranks(stages + 1):
        timeline = decoded(preset, kind, stages, batch_size)
    spans = [span for span in timeline.spans if span.kind == "draft"]
    assert len(spans) > 10, "the draft's work is missing in the trace"
    draft_rank = stages + 1 if preset == "amusd" else 0
    assert {span.rank for span in spans} == {draft_rank}
    assert all(span.seconds > 0 for span in spans)


@pytest.mark.distributed
@pytest.mark.parametrize("preset", sampled(PRESETS, every=2))
def test_lossless_beside_processes(preset: str, keep_ranks: Callable[..., None]) -> None:
    keep_ranks()
    decoded(preset, "measured", 1, 3)


@pytest.mark.distributed
def test_a_wait_for_events_ends_when_ranks_are_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 sees no reply, as if the ranks were stuck; the limit of ``collect`` holds here too."""
    model = {"kind": "random", **toys.MODEL}
    ranks = Ranks(model=model, clock=CLOCKS["measured"], threads=1, timeout_s=1.0)
    bench = Workbench(toys.pair(), seed=toys.SEED, ranks=ranks)
    keys = {"executor.stages": 2, "executor.transport": "distributed"}
    parts = build("amusd", bench, **keys)
    monkeypatch.setattr(RankGroup, "has_reply", lambda *_: False)
    start = monotonic()
    try:
        with pytest.raises(RankFailure, match=r"nothing has moved for executor\.timeout_s=1 s"):
            decode_cases(parts, toys.cases(12)[:1])
    finally:
        parts.executor.shutdown()
    assert monotonic() - start < 20.0
