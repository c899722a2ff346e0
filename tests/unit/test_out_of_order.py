"""Answers in any order: copies of the target that do not wait for each other, with random delays.

An answer stays with its node until the verifier's walk from the root reaches it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from specdec.certify.cases import Case
from specdec.certify.laws import (
    FALSE_ALARM,
    OPPOSED_TABLE,
    SAMPLINGS,
    TARGET_TABLE,
    chi_square,
    pair_counts,
    pair_laws,
    total_variation,
)
from specdec.certify.oracle import reference_probs
from specdec.certify.subject import decode_cases, decode_steps
from specdec.clocks import Clock, MeasuredClock
from specdec.compose.planned import planned
from specdec.compose.workbench import Parts, Workbench
from specdec.interfaces import TreePolicy
from specdec.pairs import TablePair
from specdec.policies import Chain, FixedWidth
from specdec.serving.rules import ServingRules
from specdec.sources import DraftModelSource
from specdec.state import DecodeState, StopRules
from specdec.types import Output
from specdec.verifiers import MatchVerifier, RejectionVerifier
from tests import toys
from tests.toys import FreeRunning, Replicas

pytestmark = pytest.mark.slow

POLICIES: dict[str, Callable[[], TreePolicy]] = {
    "chain": lambda: Chain(gamma=3),
    "levels": lambda: FixedWidth(width=4, children=3),
    "two levels": lambda: FixedWidth(width=2, children=2, levels_per_step=2),
    "chain of levels": lambda: FixedWidth(width=1, children=1),
}
TIMES: dict[str, Callable[[], Clock]] = {
    "slow target": lambda: toys.simulated(10.0, 3.0),
    "measured": MeasuredClock,
}


def composed(
    models: Any,
    policy: TreePolicy,
    clock: Clock,
    *,
    replicas: int = 2,
    delay_ms: float = 20.0,
    serving: ServingRules | None = None,
    sample: bool = False,
) -> Parts:
    """A draft model and copies of the target."""
    bench = Workbench(models, seed=toys.SEED, clock=clock)
    return bench.parts(
        source=DraftModelSource(runner=bench.draft_runner(), sample=sample),
        policy=policy,
        verifier=RejectionVerifier() if sample else MatchVerifier(),
        executor=planned(Replicas, models, replicas=replicas, delay_ms=delay_ms),
        serving=serving,
    )


@dataclass
class Order:
    """What arrived when.

    Attributes:
        early: answers of nodes whose parent was submitted and had no answer yet.
        stored: accepted nodes whose answer came in a step before.
        pruned: answers of nodes that had left the tree.
        fed: number of requests fed in each step.
        in_flight: largest number of live submitted nodes of one request.
    """

    early: int = 0
    stored: int = 0
    pruned: int = 0
    fed: list[int] = field(default_factory=list)
    in_flight: int = 0


def watched(
    parts: Parts, wanted: Sequence[Case], batch_size: int
) -> tuple[dict[int, Any], Order, DecodeState]:
    """Decodes cases and records the order of the answers."""
    outputs: dict[int, Any] = {}
    seen, arrived, state = Order(), dict[tuple[int, int], int](), parts.new_state()
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
        seen.fed.append(len(batch.trees))
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
    return outputs, seen, state


@pytest.mark.parametrize(
    ("policy", "replicas", "batch_size"),
    [
        ("chain", 2, 3),
        ("levels", 3, 3),
        ("two levels", 3, 1),
        ("chain of levels", 3, 3),
    ],
)
@pytest.mark.parametrize("times", ["slow target", "measured"])
def test_the_output_is_that_of_plain_decoding(
    times: str, policy: str, replicas: int, batch_size: int
) -> None:
    wanted = toys.cases(12)[:: 2 if batch_size == 1 else 1]  # every sampling
    parts = composed(toys.pair(), POLICIES[policy](), TIMES[times](), replicas=replicas)
    outputs, seen, _ = watched(parts, wanted, batch_size)
    toys.assert_plain(outputs, wanted)
    if getattr(parts.policy, "serial", True):  # a request waits for its batch
        assert seen.early == seen.stored == 0
        return
    assert seen.early > 5, "no answer of a node came before that of its parent"
    assert seen.stored > 2, "no stored answer was used"
    assert seen.pruned > 2, "no answer came for a node that was gone"


# Pages.


@pytest.mark.parametrize("policy", ["chain", "levels", "two levels"])
def test_caches_in_pages_are_large_enough(policy: str) -> None:
    """Admission relies on ``max_cached_nodes``; answers that wait for their root stay cached."""
    wanted = toys.cases(12)
    chosen = POLICIES[policy]()
    need = max(len(case.prompt) for case in wanted) + 12 + chosen.max_cached_nodes(3)
    kv_tokens = 2 * 4 * -(-need // 4)  # two of the longest requests, in blocks of 4
    parts = composed(
        toys.pair(),
        chosen,
        TIMES["slow target"](),
        replicas=3,
        delay_ms=60.0,
        serving=ServingRules(kv_tokens=kv_tokens, block_tokens=4),
    )
    outputs, seen, state = watched(parts, wanted, 4)
    toys.assert_plain(outputs, wanted)
    assert seen.in_flight <= chosen.max_cached_nodes(3)
    assert state.load.kv_peak_tokens <= kv_tokens


# Rejection sampling.

NUM_REQUESTS, NUM_TOKENS = 600, 3
LAW_POLICIES: dict[str, Callable[[], TreePolicy]] = {
    "a chain of 2": lambda: Chain(gamma=2),
    "a chain of levels": lambda: FixedWidth(width=1, children=1),
    "a free draft": lambda: FreeRunning(feed_at_once=False, ahead=3),
}


def law_tests(policy: str, sampling: str) -> list[tuple[float, float, float]]:
    """(p-value, total variation, its bound) of each pair of neighbouring tokens.

    Rates: ``FALSE_ALARM`` of 1e-6 per test, for a seed drawn anew.
    """
    params, rows = SAMPLINGS[sampling], np.array(TARGET_TABLE)
    models = TablePair(target=TARGET_TABLE, draft=OPPOSED_TABLE)
    stop = StopRules(max_new_tokens=NUM_TOKENS)
    wanted = [Case(i, "", (0,), params, stop) for i in range(NUM_REQUESTS)]
    parts = composed(
        models, LAW_POLICIES[policy](), TIMES["slow target"](), replicas=2, sample=True
    )
    outputs = decode_cases(parts, wanted, batch_size=200)
    tokens = np.array([outputs[case.id].output for case in wanted])
    laws = pair_laws(np.stack([reference_probs(r, params) for r in rows]), 0, NUM_TOKENS)
    return [
        (chi_square(counts, law), *total_variation(counts, law))
        for counts, law in zip(pair_counts(tokens, len(rows)), laws, strict=True)
    ]


@pytest.mark.parametrize(
    ("policy", "sampling"),
    [
        ("a chain of 2", "t=1"),
        pytest.param("a free draft", "t=1", marks=pytest.mark.exhaustive),
        ("a chain of levels", "t=0.8 top_k=4 top_p=0.95"),
    ],
)
def test_rejection_keeps_the_law(policy: str, sampling: str) -> None:
    for p_value, distance, bound in law_tests(policy, sampling):
        assert p_value > FALSE_ALARM
        assert distance < bound
