"""Early hidden states over ranks: they arrive within the step, and are those of one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from specdec.compose.planned import planned
from specdec.compose.workbench import Workbench
from specdec.distributed.executor import DistributedExecutor
from specdec.distributed.ranks import Ranks
from specdec.executors import PipelineExecutor
from specdec.types import HiddenName
from tests import early, toys
from tests.distributed.fake_ranks import thread_ranks
from tests.early import Arrivals
from tests.toys import LevelWhenKnown


def decoded(*, stages: int, layer: int, batch_size: int) -> tuple[Arrivals, LevelWhenKnown]:
    """Decodes over ranks, with the model of ``toys.pair``."""
    model = {"kind": "random", **toys.MODEL}
    ranks = Ranks(model=model, clock={"kind": "measured"}, threads=1)
    bench = Workbench(toys.pair(), seed=toys.SEED, ranks=ranks)
    executor = planned(PipelineExecutor, toys.pair(), stages=stages, transport="distributed")
    parts = early.composed(bench, executor, name=HiddenName(layer))
    assert isinstance(parts.executor, DistributedExecutor)
    try:
        seen = early.run(parts, toys.cases(12), batch_size=batch_size, prefill_chunk=4)
    finally:
        parts.executor.shutdown()
    assert isinstance(parts.policy, LevelWhenKnown)
    return seen, parts.policy


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "layer", "delay"), [(2, 0, 0), (2, 1, 0), (4, 1, 1), (4, 2, 2), (1, 2, 0)]
)
def test_states_arrive_in_the_step_of_their_rank(stages: int, layer: int, delay: int) -> None:
    """Ranks are threads here."""
    with thread_ranks(stages + 1):
        seen, policy = decoded(stages=stages, layer=layer, batch_size=3)
    assert seen.delays == {delay}
    assert seen.prompt_delays == {delay}
    assert seen.waits == {stages - 1 - delay}
    assert seen.error < early.TOLERANCE
    assert policy.early_events > 10, "nothing arrived within a step"


@pytest.mark.distributed
def test_states_arrive_from_processes(keep_ranks: Callable[..., None]) -> None:
    keep_ranks(2)
    seen, policy = decoded(stages=2, layer=1, batch_size=3)
    assert seen.delays == seen.prompt_delays == {0}
    assert seen.error < early.TOLERANCE
    assert policy.early_events > 10
