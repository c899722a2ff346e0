"""Strategies whose draft works beside the target: their laws against simulated time, their rounds.

Laws are for independent positions. The synthetic pair has one class of positions, and the profile
has constant times, so the simulated time per token must be the law's, up to chance and the ends of
texts. The bound is 5 %; at the ends, prompts and last rounds, up to 2 % of it is spent.
"""

import numpy as np
import pytest

from experiments.open.time_laws import amusd_time, pearl_time, ssd_hit_rate, ssd_time
from specdec.compose.workbench import Parts, Workbench, build
from specdec.pairs import build_pair
from specdec.state import RequestState
from strategies.pearl import Pearl
from strategies.ssd import Ssd, fan_outs
from tests import toys
from tests.laws import one_class_bench, ranks, submitted_batches
from tests.states import new_request

pytestmark = pytest.mark.slow

BOUND = 0.05
NUM_REQUESTS, NUM_TOKENS = 6, 400


def decoded(
    parts: Parts,
    *,
    num_requests: int = NUM_REQUESTS,
    batch_size: int = 1,
    num_tokens: int = NUM_TOKENS,
) -> tuple[float, list[RequestState]]:
    """(milliseconds per token, requests).

    In a batch, where the rounds of all requests coincide, the time per token of each of them.
    """
    requests = [new_request(number, (1,), num_tokens) for number in range(num_requests)]
    for _ in parts.decode(parts.new_state(), requests, batch_size=batch_size):
        pass
    if batch_size > 1:
        return 1e3 * float(np.mean([r.emitted_s[-1] for r in requests])) / num_tokens, requests
    return 1e3 * parts.clock.now() / (num_requests * num_tokens), requests


def hit_rate(requests: list[RequestState]) -> float:
    hits, misses = (sum(getattr(r.counters, n) for r in requests) for n in ("hits", "misses"))
    return float(hits / (hits + misses))


# PEARL.


@pytest.mark.parametrize(
    ("alpha", "gamma", "target", "draft"),
    [
        (0.8, 5, 10.0, 2.0),
        (0.9, 8, 10.0, 2.0),  # the draft takes longer
    ],
)
def test_pearl_takes_the_time_of_its_law(
    alpha: float, gamma: int, target: float, draft: float
) -> None:
    time, _ = decoded(
        build("pearl", one_class_bench(alpha, target, draft), gamma=gamma),
        num_requests=8,
        batch_size=8,
    )
    law = pearl_time(alpha=alpha, gamma=gamma, target=target, draft=draft)
    assert time == pytest.approx(law, rel=BOUND)


def test_gamma_is_the_ratio_of_pass_times() -> None:
    """Of the whole target; on one stage see ``test_lengths_follow_the_profile``."""
    assert Pearl(gamma="ratio", latency=4, profile=toys.profile(10.0, 3.0)).gamma == 13


def test_until_ready_fills_the_targets_pass() -> None:
    """It begins no pass after the target's has ended."""
    times = [
        decoded(build("pearl", one_class_bench(0.8, 10.0, 3.0), gamma=gamma), num_requests=1)[0]
        for gamma in ("until_ready", 4)
    ]
    assert times[0] == pytest.approx(times[1])


# SSD.


@pytest.mark.parametrize(
    ("alpha", "gamma", "outcomes", "target", "draft"),
    [
        (0.8, 3, 6, 10.0, 2.0),
        (0.8, 6, 24, 10.0, 2.0),  # the draft takes longer
    ],
)
def test_ssd_takes_the_time_of_its_law(
    alpha: float, gamma: int, outcomes: int, target: float, draft: float
) -> None:
    parts = build("ssd", one_class_bench(alpha, target, draft), gamma=gamma, outcomes=outcomes)
    policy = parts.policy
    assert isinstance(policy, Ssd)
    time, requests = decoded(parts, num_requests=10)
    given = {"ranks": ranks(alpha), "fan_outs": policy.fan_outs}
    assert hit_rate(requests) == pytest.approx(ssd_hit_rate(**given), rel=BOUND)
    assert time == pytest.approx(ssd_time(**given, target=target, draft=draft), rel=BOUND)


@pytest.mark.parametrize(("gamma", "outcomes", "power"), [(7, 5, 0.0), (3, 24, 1.0), (1, 1, 3.0)])
def test_the_fan_out_spends_the_outcomes(gamma: int, outcomes: int, power: float) -> None:
    shares = fan_outs(gamma=gamma, outcomes=outcomes, acceptance=0.7, power=power)
    assert len(shares) == gamma + 1
    assert sum(shares) == outcomes
    assert shares[:-1] == sorted(shares[:-1], reverse=True)


@pytest.mark.parametrize(("alpha", "power"), [(0.6, 0.5), (0.8, 1.0), (0.9, 2.0)])
def test_the_fan_out_is_the_best_for_its_law(alpha: float, power: float) -> None:
    """Moving an outcome to another length gains nothing beyond what rounding may cost."""
    gamma, outcomes = 4, 200
    ends = np.array([alpha**k * (1 - alpha) for k in range(gamma)] + [alpha**gamma])

    def missed(counts: np.ndarray) -> float:
        return float((ends * np.maximum(counts, 1e-9) ** -power).sum())

    shares = fan_outs(gamma=gamma, outcomes=outcomes, acceptance=alpha, power=power)
    best = np.array(shares)
    for source in range(gamma + 1):
        for to in range(gamma + 1):
            moved = best.copy()
            moved[source] -= 3
            moved[to] += 3
            assert missed(moved) >= missed(best) - 1e-12


# AMUSD.


def test_amusd_takes_the_time_of_its_law() -> None:
    time, _ = decoded(build("amusd", one_class_bench(0.9, 10.0, 4.0), ahead=64), num_requests=4)
    assert time == pytest.approx(amusd_time(alpha=0.9, target=10.0, draft=4.0), rel=BOUND)


@pytest.mark.parametrize("wait", [True, False])
def test_the_target_waits_for_a_token_or_not(wait: bool) -> None:
    """Batches of the root alone: none but at the end of a text, or one after every miss."""
    parts = build("amusd", one_class_bench(0.7, 10.0, 3.0), wait=wait)
    batches = submitted_batches(parts)
    for _ in parts.decode(parts.new_state(), [new_request(1, (1,), NUM_TOKENS)]):
        pass
    lonely = [batch.num_nodes for batch in batches].count(1)
    assert lonely <= 2 if wait else lonely > 50


CLASSES = {"weights": [0.5, 0.5], "top1": [0.95, 0.4], "decay": [2.5, 1.8], "miss": [0.0, 0.0]}


def test_scores_are_spent_on_the_most_probable_outcomes() -> None:
    """Of all untaken candidates of the chain no one is more probable than a chosen outcome."""
    models = build_pair({"kind": "synthetic", **CLASSES, "vocab_size": 4096})
    parts = build(
        "ssd",
        Workbench(models, clock=toys.simulated(10.0, 2.5)),
        gamma=3,
        outcomes=8,
        spend="scores",
    )
    one, checked = new_request(1, (1,), 60), 0
    collect = parts.executor.collect

    def looking(**keys: bool):
        nonlocal checked
        tree = one.tree
        chain = np.flatnonzero(tree.submitted_at >= 0)
        chosen = np.flatnonzero((tree.submitted_at < 0) & np.isin(tree.parents, chain))
        if len(chosen):
            rest = tree.candidate_logprobs[chain] + tree.scores[chain][:, None]
            assert len(chosen) == 8
            assert tree.scores[chosen].min() >= rest.max() - 1e-12
            checked += 1
        return collect(**keys)

    parts.executor.collect = looking
    for _ in parts.decode(parts.new_state(), [one]):
        pass
    assert checked > 5


@pytest.mark.parametrize(
    ("target", "draft", "of_pearl", "of_ssd"),
    [(10.0, 2.0, 5, 4), (10.0, 3.0, 3, 2), (2.0, 3.0, 1, 1), (90.0, 1.0, 16, 8)],
)
def test_lengths_follow_the_profile(
    target: float, draft: float, of_pearl: int, of_ssd: int
) -> None:
    bench = Workbench(toys.pair(), clock=toys.simulated(target, draft))
    first, second = build("pearl", bench).policy, build("ssd", bench).policy
    assert isinstance(first, Pearl)
    assert isinstance(second, Ssd)
    assert (first.gamma, second.gamma) == (of_pearl, of_ssd)
