"""The choice among arms: on a simulated clock, where every round has a known price."""

import re

import numpy as np
import pytest

from specdec.clocks import CostCurve, LatencyProfile, SimulatedClock
from specdec.compose.workbench import Workbench
from specdec.pairs.recorded import RecordedPair
from specdec.policies import Adaptive, Arm, BestFirst, Chain, CostSized, RootOnly
from specdec.sources import MixtureSource, NullSource, SyntheticPair, SyntheticSource
from specdec.types import Candidates
from specdec.verifiers import MatchVerifier
from tests.states import new_request

NUM_TOKENS = 300
DEAR = LatencyProfile(  # a target pass of one row takes 10 ms, each further row 0.5
    name="dear",
    costs={
        "stage": CostCurve(tokens=(1, 2), ms=(10.0, 10.5)),
        "draft": CostCurve(tokens=(1, 2), ms=(3.0, 3.1)),
    },
)
HOPELESS = {"weights": [1.0], "top1": [0.05], "decay": [1.0], "miss": [0.99]}
GOOD = {"weights": [1.0], "top1": [0.9], "decay": [2.0], "miss": [0.0]}


def small() -> BestFirst:
    return BestFirst(bs=4, w=1, d=3, children=2)


def large() -> BestFirst:
    return BestFirst(bs=16, w=4, d=4, children=4)


def arms() -> list[Arm]:
    return [
        Arm(name="none proposed", policy=Chain(gamma=2), member=0),
        Arm(name="small", policy=small(), member=1),
        Arm(name="large", policy=large(), member=1),
    ]


class LateOracle(NullSource):
    """Proposes the target's tokens, which costs it nothing, but wrong ones below ``start``."""

    def __init__(self, hidden, start):
        self._hidden, self._start = hidden, start

    def expand(self, state, nodes, k):
        candidates = Candidates.empty(len(nodes), 1)
        for request_id, ids, rows in nodes.packed():
            tree = state.requests[request_id].tree
            positions = tree.positions[tree.slots(ids)]
            right = self._hidden.tokens(request_id, positions + 1)
            wrong = (right + 1) % self._hidden.vocab_size
            candidates.tokens[rows, 0] = np.where(positions < self._start, wrong, right)
            candidates.logprobs[rows, 0] = 0.0
        candidates.counts[:] = 1
        return candidates


def seconds(
    policy,
    law,
    *,
    num_requests=2,
    batch=1,
    mixed=True,
    profile=DEAR,
    kind=SyntheticSource,
    prompt=4,
    oracle_from=None,
) -> tuple[float, list[list[int]]]:
    """Simulated seconds of the requests, and their outputs."""
    hidden = SyntheticPair(vocab_size=512, **law)
    bench = Workbench(RecordedPair(hidden), clock=SimulatedClock(profile))
    draft = kind(pair=hidden)
    first = NullSource() if oracle_from is None else LateOracle(hidden, oracle_from)
    source = MixtureSource(sources=[first, draft]) if mixed else draft
    parts = bench.parts(source=source, policy=policy, verifier=MatchVerifier())
    requests = [
        new_request(i, hidden.tokens(i, np.arange(prompt)), NUM_TOKENS) for i in range(num_requests)
    ]
    for _ in parts.decode(parts.new_state(), requests, batch_size=batch):
        pass
    return bench.clock.now(), [r.output for r in requests]


@pytest.mark.slow
def test_where_speculation_loses_it_is_plain_decoding():
    """Every fixed arm is slower than plain decoding; the choice is within the explored share."""
    plain, output = seconds(RootOnly(), HOPELESS)
    fixed = [seconds(policy, HOPELESS)[0] for policy in (small(), large())]
    policy = Adaptive(arms=arms(), explore=0.02)
    chosen, same = seconds(policy, HOPELESS)
    assert same == output
    assert min(fixed) > 1.3 * plain
    trials = 2 * (30.0 + 25.0) / 1e3  # the first rounds of both drafting arms, in seconds
    assert chosen <= 1.03 * plain + trials
    assert policy.rounds[2] + policy.rounds[3] < 0.1 * sum(policy.rounds)


def test_where_speculation_wins_it_is_nearly_the_best_arm():
    fixed = [seconds(policy, GOOD)[0] for policy in (RootOnly(), small(), large())]
    policy = Adaptive(arms=arms(), explore=0.02)
    chosen, _ = seconds(policy, GOOD)
    assert min(fixed) < 0.7 * fixed[0]
    assert chosen <= 1.06 * min(fixed)
    assert policy.rounds[0] < 0.1 * sum(policy.rounds)


def test_a_source_without_members_is_used_whole():
    policy = Adaptive(arms=arms(), explore=0.02)
    chosen, output = seconds(policy, GOOD, mixed=False)
    assert output == seconds(RootOnly(), GOOD)[1]
    assert chosen < 0.8 * seconds(RootOnly(), GOOD)[0]


def test_losses_are_counted_on_balance():
    """Rounds of an equally good arm lose and win by chance: they leave the budget for trials."""
    twins = [Arm(name=name, policy=small(), member=1) for name in ("one", "other")]
    policy = Adaptive(arms=twins, explore=0.02)
    seconds(policy, {**GOOD, "top1": [0.75]}, num_requests=6)
    assert policy.rounds[0] < 0.03 * sum(policy.rounds), "the gain of plain decoding is known"


def test_a_source_with_much_to_catch_up_does_not_keep_a_cheap_one_from_being_tried():
    """Trials of the draft lose more than all of the explored share: it reads 2,000 tokens first."""
    policy = Adaptive(arms=arms(), explore=0.02)
    chosen, output = seconds(policy, HOPELESS, num_requests=1, prompt=2000, oracle_from=2020)
    plain, same = seconds(RootOnly(), HOPELESS, num_requests=1, prompt=2000)
    assert output == same
    assert policy.rounds[1] > 0.5 * sum(policy.rounds)
    assert chosen < 0.8 * plain


def test_a_policy_that_may_submit_the_root_alone_replaces_plain_decoding():
    sized = CostSized(bs=8, w=1, d=4, children=2)
    policy = Adaptive(arms=[Arm(name="sized", policy=sized, member=1), *arms()], explore=0.02)
    chosen, output = seconds(policy, HOPELESS, num_requests=1)
    plain, same = seconds(RootOnly(), HOPELESS, num_requests=1)
    assert output == same
    assert policy.rounds[0] == 2
    assert chosen < 1.1 * plain


def test_without_exploring_a_wrong_first_impression_stays():
    """Planted: first costs that mislead. Without trials the arms are not seen again."""

    def rounds(explore):
        policy = Adaptive(arms=arms(), explore=explore)
        for gain, cost in zip(policy._gains, policy._costs, strict=True):
            for _ in range(2):
                gain.add(1.0)
                cost.add(0.01)
        for _ in range(20):  # the large tree cost ten times as much, so far
            policy._costs[3].add(0.1)
            policy._costs[2].add(0.1)
        seconds(policy, GOOD, num_requests=3)
        return policy.rounds[2] + policy.rounds[3]

    assert rounds(0.0) == 0
    assert rounds(0.2) > 100


def test_the_notes_name_the_break_even():
    policy = Adaptive(arms=arms(), explore=0.02)
    seconds(policy, HOPELESS)
    lines = policy.notes()
    assert len(lines) == 4
    assert lines[0].startswith("adaptive: plain: ")
    found = re.search(r"pays above (\d+\.\d\d) tokens per round", lines[3])
    assert found is not None
    # A round of the large tree: 10 + 15 x 0.5 ms of the target and 4 passes of about 3 ms, over 10.
    assert 1.5 < float(found[1]) < 6
