"""SSD's outcomes spent by probability, and lengths that follow the latency profile."""

from __future__ import annotations

import numpy as np
import pytest

from specdec.compose.presets import build
from specdec.compose.workbench import Workbench
from specdec.pairs import build_pair
from strategies.pearl import Pearl
from strategies.ssd import Ssd
from tests import toys
from tests.states import new_request
from tests.unit.test_asynchronous import decoded, hit_rate

pytestmark = pytest.mark.slow

CLASSES = {"weights": [0.5, 0.5], "top1": [0.95, 0.4], "decay": [2.5, 1.8], "miss": [0.0, 0.0]}


def test_scores_hit_more_than_shares_where_positions_differ() -> None:
    """As many outcomes, same draft: the uncertain positions get more of them."""
    models = build_pair({"kind": "synthetic", **CLASSES, "vocab_size": 4096})
    found = {}
    for spend in ("shares", "scores"):
        bench = Workbench(models, clock=toys.simulated(10.0, 2.5))
        parts = build("ssd", bench, gamma=3, outcomes=8, spend=spend)
        time, requests = decoded(parts, num_requests=3)
        found[spend] = hit_rate(requests), time
    assert found["scores"][0] > found["shares"][0] + 0.03
    assert found["scores"][1] < found["shares"][1]


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
