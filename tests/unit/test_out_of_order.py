"""Answers in any order: copies of the target that do not wait for each other, with random delays.

An answer stays with its node until the verifier's walk from the root reaches it. The executor is
the one of docs/adding.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec.certify.subject import decode_steps
from specdec.clocks import Clock, MeasuredClock
from specdec.compose.workbench import Workbench, planned
from specdec.interfaces import TreePolicy
from specdec.policies import Chain, FixedWidth
from specdec.serving.rules import ServingRules
from specdec.sources import DraftModelSource
from specdec.testing import FALSE_ALARM, OPPOSED_TABLE, TARGET_TABLE, TablePair
from specdec.types import Output
from specdec.verifiers import MatchVerifier, RejectionVerifier
from tests import toys
from tests.laws import least_p_value

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "examples"))  # an outside package
from replicas import Replicas

pytestmark = pytest.mark.slow

POLICIES: dict[str, Callable[[], TreePolicy]] = {
    "chain": lambda: Chain(gamma=3),
    "levels": lambda: FixedWidth(width=4, children=3),
    "two levels": lambda: FixedWidth(width=2, children=2, levels_per_step=2),
}
CLOCKS: dict[str, Callable[[], Clock]] = {
    "simulated": lambda: toys.simulated(10.0, 3.0),
    "measured": MeasuredClock,
}


@dataclass
class Order:
    """What arrived when.

    Attributes:
        early: answers of nodes whose parent was submitted and had no answer yet.
        stored: accepted nodes whose answer came in a step before.
        pruned: answers of nodes that had left the tree.
        in_flight: largest number of live submitted nodes of one request.
    """

    early: int = 0
    stored: int = 0
    pruned: int = 0
    in_flight: int = 0


@pytest.mark.parametrize(
    ("policy", "clock", "batch_size"),
    [
        ("chain", "simulated", 4),
        ("levels", "simulated", 4),
        ("levels", "measured", 3),
        ("two levels", "simulated", 1),
    ],
)
def test_the_output_is_that_of_plain_decoding(policy: str, clock: str, batch_size: int) -> None:
    """Also in paged caches: admission relies on ``max_cached_nodes``, but answers wait there."""
    wanted, chosen, seen = toys.cases(12), POLICIES[policy](), Order()
    need = max(len(case.prompt) for case in wanted) + 12 + chosen.max_cached_nodes(3)
    kv_tokens = 2 * 4 * -(-need // 4)  # two of the longest requests, in blocks of 4
    bench = Workbench(toys.pair(), seed=toys.SEED, clock=CLOCKS[clock]())
    parts = bench.parts(
        source=DraftModelSource(runner=bench.draft_runner()),
        policy=chosen,
        verifier=MatchVerifier(),
        executor=planned(Replicas, toys.pair(), replicas=3, delay_ms=40.0),
        serving=ServingRules(kv_tokens=kv_tokens, block_tokens=4),
    )
    outputs: dict[int, Any] = {}
    arrived, state = dict[tuple[int, int], int](), parts.new_state()
    collect, submit = parts.executor.collect, parts.executor.submit

    def noting_collect(*, wait: bool = True) -> Output:
        output = collect(wait=wait)
        together = {(a.request, i) for a in output.answers for i in a.node_ids.tolist()}
        for request_id, node_id in together:
            tree = state.requests[request_id].tree
            slot = int(tree.slots(np.array([node_id]))[0])
            arrived[request_id, node_id] = state.step
            if slot < 0:
                seen.pruned += 1
            elif slot > 0:
                parent = int(tree.parents[slot])
                above = (request_id, int(tree.ids[parent]))
                waits = tree.submitted_at[parent] >= 0 and not tree.answered[parent]
                seen.early += bool(waits) and above not in together
        return output

    def noting_submit(batch: Any) -> None:
        for request in state.requests.values():
            live = int(np.count_nonzero(request.tree.submitted_at >= 0))
            seen.in_flight = max(seen.in_flight, live)
        submit(batch)

    parts.executor.collect = noting_collect  # type: ignore[method-assign]
    parts.executor.submit = noting_submit  # type: ignore[method-assign]
    for commits in decode_steps(parts, wanted, outputs, batch_size=batch_size, state=state):
        seen.stored += sum(
            arrived[commit.request, node_id] < commit.step
            for commit in commits
            for node_id in commit.retired_ids[1:].tolist()
        )
    toys.assert_plain(outputs, wanted)
    assert seen.in_flight <= chosen.max_cached_nodes(3)
    assert state.load.kv_peak_tokens <= kv_tokens
    if getattr(chosen, "serial", True):  # a request waits for its batch
        assert seen.early == seen.stored == 0
        return
    assert seen.early > 5, "no answer of a node came before that of its parent"
    assert seen.stored > 2, "no stored answer was used"
    assert seen.pruned > 2, "no answer came for a node that was gone"


def test_rejection_keeps_the_law_of_the_target() -> None:
    """A chain, level by level: an accepted child's answer may come later than its parent's."""
    models = TablePair(target=TARGET_TABLE, draft=OPPOSED_TABLE)
    bench = Workbench(models, seed=toys.SEED, clock=CLOCKS["simulated"]())
    parts = bench.parts(
        source=DraftModelSource(runner=bench.draft_runner(), sample=True),
        policy=FixedWidth(width=1, children=1),
        verifier=RejectionVerifier(),
        executor=planned(Replicas, models, replicas=2, delay_ms=20.0),
    )
    assert least_p_value(parts, 600, num_tokens=3, batch_size=200) > FALSE_ALARM
