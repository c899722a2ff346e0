"""Trees sized by cost: on a simulated clock, where every row and every draft pass has a price."""

from itertools import product

import numpy as np
import pytest

from specdec.clocks import CONTROLLER, CostCurve, LatencyProfile, Work
from specdec.policies import BestFirst, CostSized, RootOnly
from specdec.policies.fading_mean import FadingLine
from specdec.sources import SyntheticSource

from . import test_adaptive as bench

LAWS = {
    "good": bench.GOOD,
    "fair": {**bench.GOOD, "top1": [0.6]},
    "of two classes": {
        **{"weights": [0.5, 0.5], "top1": [0.9, 0.3]},
        **{"decay": [2.0, 1.0], "miss": [0.0, 0.3]},
    },
}


def profile(row_ms: float, draft_ms: float) -> LatencyProfile:
    costs = {
        "stage": CostCurve(tokens=(1, 2), ms=(10.0, 10.0 + row_ms)),
        "draft": CostCurve(tokens=(1,), ms=(draft_ms,)),
    }
    return LatencyProfile(name="priced", costs=costs)


class CatchesUp(SyntheticSource):
    """Makes a draft pass more for every 4 tokens since it was last called, of one request."""

    seen = 0

    def expand(self, state, nodes, k):
        (request,) = state.requests.values()
        for _ in range((len(request.output) - self.seen) // 4):
            state.clock.charge(CONTROLLER, Work.DRAFT, 1)
        self.seen = len(request.output)
        return super().expand(state, nodes, k)


def seconds(policy, law, prices, kind=SyntheticSource) -> tuple[float, list[list[int]]]:
    priced = {"profile": profile(*prices), "kind": kind}
    return bench.seconds(policy, law, num_requests=3, mixed=False, **priced)


def sized() -> CostSized:
    return CostSized(bs=32, w=4, d=8, children=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("law", "prices"),
    [("good", (0.05, 1.0)), ("fair", (2.0, 1.0)), ("of two classes", (0.2, 8.0))],
)
def test_it_is_nearly_the_best_of_many_fixed_trees(law, prices):
    """The fixed ones are chosen afterwards, for this very text."""
    plain, output = seconds(RootOnly(), LAWS[law], prices)
    fixed = []
    for (bs, w), depth in product(((3, 1), (16, 4)), (1, 3, 8)):
        policy = BestFirst(bs=bs, w=w, d=depth, children=4, min_prob=0.01, min_mass=0.2)
        fixed.append(seconds(policy, LAWS[law], prices)[0])
    chosen, same = seconds(sized(), LAWS[law], prices)
    assert same == output
    assert chosen < 1.07 * min(plain, *fixed)


def test_where_drafts_are_useless_it_is_plain_decoding():
    """The source is sure of its tokens, and wrong."""
    plain, output = seconds(RootOnly(), bench.HOPELESS, (0.5, 3.0))
    chosen, same = seconds(sized(), bench.HOPELESS, (0.5, 3.0))
    assert same == output
    first_rounds = 3 * (8 * 3.0 + 31 * 0.5) / 1e3
    assert chosen < 1.03 * plain + first_rounds


def test_given_sizes_stay_within_the_limits(monkeypatch):
    """The first rounds and retries too: caches have room for no more than ``bs`` nodes."""
    policy = CostSized(bs=3, w=1, d=1, children=2)
    rows, add = [], FadingLine.add
    monkeypatch.setattr(FadingLine, "add", lambda line, x, y: (rows.append(x), add(line, x, y)))
    seconds(policy, bench.HOPELESS, (0.5, 3.0))
    assert max(rows) == 3


def test_dear_rows_make_small_trees_and_dear_drafts_shallow_ones():
    rows, passes = {}, {}
    for prices in ((0.1, 1.0), (2.0, 1.0), (0.1, 8.0)):
        policy = sized()
        seconds(policy, LAWS["fair"], prices)
        n, x = policy._pass.sums[:2]
        rows[prices], passes[prices] = x / n, policy._draft.sums[1] / policy._draft.sums[0]
    assert rows[2.0, 1.0] < 0.5 * rows[0.1, 1.0]
    assert passes[0.1, 8.0] < 0.6 * passes[0.1, 1.0]


@pytest.mark.parametrize(
    ("law", "kind"), [(LAWS["fair"], SyntheticSource), (bench.HOPELESS, CatchesUp)]
)
def test_the_prices_are_found(law, kind):
    """Without what a source catches up after rounds that have not drafted."""
    policy = sized()
    seconds(policy, law, (0.5, 3.0), kind)
    found = "a pass 10.00 ms, each further row 0.50 ms, a draft pass 3.00 ms, a further one 3.00"
    assert found in policy.notes()[0]


def test_one_slow_pass_does_not_move_the_line():
    rng, line = np.random.default_rng(0), FadingLine(fade=0.98)
    for number, rows in enumerate(rng.integers(1, 20, 60).tolist()):
        line.add(rows, 10.0 + 0.5 * rows + (1000.0 if number == 30 else 0.0))
    assert line.at(1) == pytest.approx(10.5, rel=0.1)
    assert line.slope == pytest.approx(0.5, abs=0.2)
