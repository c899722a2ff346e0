"""PipeSpec, a chain of models that run free: its law, plain decoding, and a planted fault."""

from typing import Any

import pytest

from experiments.open.time_laws import pipespec_time
from specdec.certify.subject import decode_cases
from specdec.clocks import Clock, SimulatedClock, Timeline
from specdec.compose.workbench import Workbench, build
from specdec.pairs import RandomPair, build_pair
from specdec.sources import Background, DraftModelSource, ModelChain
from specdec.verifiers import MatchVerifier
from strategies.pipespec import FreeChain
from tests import toys
from tests.laws import submitted_batches
from tests.states import new_request
from tests.unit.test_asynchronous import NUM_TOKENS, decoded

pytestmark = pytest.mark.slow

BOUND = 0.05
NUM_REQUESTS = 20  # with 5 the mean itself is off by up to 5 %
LAW_CASES = [  # chances of draft and middle model, times of target, middle model and draft
    (0.7, 0.9, 12.0, 3.0, 1.0),
    pytest.param(0.8, 0.95, 30.0, 6.0, 1.0, marks=pytest.mark.exhaustive),
]


def clock_of(target: float, middle: float, draft: float) -> SimulatedClock:
    profile = toys.priced(stage=target, middle=middle, draft=draft)
    return SimulatedClock(profile, timeline=Timeline())


def synthetic(draft_right: float, middle_right: float) -> Any:
    law = {"weights": [1.0], "top1": [draft_right], "decay": [2.0], "miss": [0.0]}
    return build_pair({"kind": "synthetic", **law, "middle_top1": [middle_right]})


def three(clock: Clock, num_draft: int = 2, num_middle: int = 3) -> Workbench:
    """Random models of 4, 3 and 2 layers, each the first layers of the larger ones."""
    layers = {"draft_layers": num_draft, "middle_layers": num_middle}
    return Workbench(RandomPair(**{**toys.MODEL, **layers}), seed=toys.SEED, clock=clock)


@pytest.mark.parametrize(("draft_right", "middle_right", "target", "middle", "draft"), LAW_CASES)
def test_it_takes_the_time_of_its_law(
    draft_right: float, middle_right: float, target: float, middle: float, draft: float
) -> None:
    clock = clock_of(target, middle, draft)
    bench = Workbench(synthetic(draft_right, middle_right), clock=clock)
    time, _ = decoded(build("pipespec", bench, ahead=64), num_requests=NUM_REQUESTS)
    law = pipespec_time(
        draft_right=draft_right,
        middle_right=middle_right,
        target=target,
        middle=middle,
        draft=draft,
    )
    assert time == pytest.approx(law, rel=BOUND)


def test_the_law_at_its_ends() -> None:
    """A draft that is never right and a middle model that always is: the middle model's pace."""
    times = {"target": 12.0, "middle": 3.0, "draft": 1.0}
    slow = pipespec_time(draft_right=0.0, middle_right=0.0, **times)
    assert slow > times["target"]  # nothing helps, and the target waits for the middle model
    alone = pipespec_time(draft_right=0.0, middle_right=0.999, **times)
    both = pipespec_time(draft_right=0.998, middle_right=0.999, **times)
    assert both < times["draft"] * 1.05 < times["middle"] < alone < slow


def test_a_chain_of_four_models() -> None:
    bench = three(clock_of(10.0, 3.0, 1.0))
    names = ("draft", "middle", "middle")
    levels = [DraftModelSource(runner=bench.runner, model=name) for name in names]
    chain = ModelChain(
        sources=[Background(source=s, free_rank=2 + i) for i, s in enumerate(levels)]
    )
    policy = FreeChain(ahead=8)
    parts = bench.parts(source=chain, policy=policy, verifier=MatchVerifier(), stages=1)
    wanted = toys.cases(12)
    toys.assert_plain(decode_cases(parts, wanted, batch_size=2), wanted)
    assert min(level.counters.passes for level in levels) > 10


def test_the_target_waits_for_as_many_tokens() -> None:
    bench = Workbench(synthetic(0.7, 0.9), clock=clock_of(12.0, 3.0, 1.0))
    parts = build("pipespec", bench, least=4)
    batches = submitted_batches(parts)
    for _ in parts.decode(parts.new_state(), [new_request(1, (1,), NUM_TOKENS)]):
        pass
    rows = [batch.num_nodes for batch in batches if batch.num_nodes]
    assert min(rows[:-4]) >= 4  # a root after a hit may be among them, submitted before or not
