"""Many requests at once: tokens, turns, blocks, arrivals, and results as each request ends."""

from typing import Any

import numpy as np
import pytest

from specdec.errors import UserError
from specdec.policies import FixedWidth, RootOnly
from specdec.serving import BlockBudget, Feeding, ServingRules, arrival_times
from tests.laws import submitted_batches
from tests.sampled import sampled
from tests.unit import serving
from tests.unit.serving import play, random_schedule

NUM_SCHEDULES = 200


@pytest.mark.slow
@pytest.mark.parametrize("part", sampled(range(16), every=2))
def test_tokens_are_each_request_s_own(part: int) -> None:
    """Whatever shares the batch, is cancelled, or waits for blocks: the request's AR tokens."""
    for seed in range(part, NUM_SCHEDULES, 16):
        assert not (wrong := play(random_schedule(seed))), f"schedule {seed}: {wrong}"


def test_schedules_put_the_cache_under_pressure() -> None:
    found = [random_schedule(seed) for seed in range(NUM_SCHEDULES)]
    assert sum(s.rules.kv_tokens is not None and s.batch_size > 1 for s in found) > 80
    assert sum(bool(s.cancels) for s in found) > 80
    assert len({(s.policy, s.rules.feeding) for s in found}) == 15


# Turns.


@pytest.mark.parametrize(
    ("feeding", "most"), [(Feeding.DYNAMIC, 6), (Feeding.MICRO_BATCHES, 3), (Feeding.ITERATION, 1)]
)
def test_so_many_requests_share_a_step(feeding: Feeding, most: int) -> None:
    """Six requests of one token each on two stages: all, a half, or one of them per step."""
    made = serving.parts(RootOnly(), ServingRules(feeding=feeding), serving.STAGES)
    fed = submitted_batches(made)
    requests = [serving.request(8 * i, 0) for i in range(6)]  # prompts of one token: no prefill
    for _ in made.decode(made.new_state(), requests, batch_size=6):
        pass
    shared = [len(batch.trees) for batch in fed]
    assert max(shared) == most
    assert sum(shared) == 6 * serving.NEW_TOKENS
    if feeding is Feeding.MICRO_BATCHES:  # both stages always have work: no step is empty
        assert min(shared[:-1]) == 3
    if feeding is Feeding.ITERATION:  # nobody gets a second turn before all had their first
        order = [batch.trees[0].request for batch in fed if batch.trees]
        assert sorted(order[:6]) == sorted(order[6:12]) == sorted(r.id for r in requests)


def test_prompts_enter_alone_where_they_come_first() -> None:
    rules = ServingRules(prefill_first=True)
    made = serving.parts(FixedWidth(width=3, children=2), rules, serving.STAGES)
    fed = submitted_batches(made)
    requests = [serving.request(i, 0, 0.02 * i) for i in range(8)]
    for _ in made.decode(made.new_state(), requests, batch_size=4, prefill_chunk=3):
        pass
    assert not any(batch.trees and batch.prefills for batch in fed)
    assert max(sum(len(c.tokens) for c in b.prefills) for b in fed) == 3


# Blocks.


def test_requests_wait_for_blocks_and_nobody_overtakes() -> None:
    budget = BlockBudget(kv_tokens=40, block_tokens=4, tree_nodes=3)
    assert budget.admit(0, 9, 8)  # 20 tokens, 5 of 10 blocks
    assert budget.admit(1, 9, 8)
    assert not budget.admit(2, 1, 1)
    budget.release(0)
    assert budget.admit(2, 1, 1)
    assert (budget.num_claimed, budget.peak_blocks) == (7, 10)


# Arrivals.


def test_arrivals(tmp_path: Any) -> None:
    assert not arrival_times("at_once", 4).any()
    times = arrival_times("poisson", 4000, rate_per_s=2.0, seed=1)
    assert (np.diff(times) >= 0).all()
    # The mean of 4000 gaps of mean 0.5 s has a standard deviation of 0.5 / sqrt(4000) s.
    assert abs(times[-1] / 4000 - 0.5) < 5 * 0.5 / 4000**0.5
    path = tmp_path / "arrivals.txt"
    path.write_text("0.5\n\n0\n2.25\n")
    assert arrival_times(str(path), 2).tolist() == [0.0, 0.5]
    with pytest.raises(UserError, match="has 3 arrivals for 4 requests"):
        arrival_times(str(path), 4)
    path.write_text("0.5\nsoon\n")
    with pytest.raises(UserError, match="line 2 is 'soon'"):
        arrival_times(str(path), 1)
    with pytest.raises(UserError, match=r"serving\.rate_per_s=null"):
        arrival_times("poisson", 1)


def test_nobody_is_admitted_before_arriving() -> None:
    made = serving.parts(RootOnly(), ServingRules(), None)
    requests = [serving.request(i, 0, at) for i, at in enumerate((1.0, 0.0, 0.1))]
    ended = []
    for _ in made.decode(made.new_state(), requests, batch_size=2, on_finish=ended.append):
        pass
    assert [r.id for r in ended] == [1, 2, 0]
    assert all(r.admitted_s >= r.arrival_s for r in ended)
    assert requests[0].admitted_s == pytest.approx(1.0)
    with pytest.raises(ValueError, match="two requests have the id 4"):
        list(made.decode(made.new_state(), [serving.request(i, 0) for i in (3, 4, 4)]))
