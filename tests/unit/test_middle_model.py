"""A third model between draft and target: what its passes cost, and where it is."""

import pytest

from specdec.certify.cases import GREEDY, TEMPERATURES_AND_FILTERS, parity_cases
from specdec.certify.subject import decode_cases
from specdec.clocks import SimulatedClock
from specdec.compose.workbench import Workbench, plan_executor
from specdec.config.hydra import compose_config
from specdec.pairs import RandomPair
from specdec.pairs.random import build_random
from specdec.policies import Chain
from specdec.sources.model_source import DraftModelSource
from specdec.verifiers import MatchVerifier
from tests import toys

CASES = parity_cases(
    {"greedy": GREEDY, **TEMPERATURES_AND_FILTERS}, per_sampling=2, vocab_size=64, num_tokens=16
)
PRICED = toys.priced(stage=8.0, middle=2.0, draft=0.5)


def pair() -> RandomPair:
    return build_random(num_layers=6, draft_layers=2, middle_layers=4, vocab_size=64)


def test_a_pass_costs_the_middle_models_price() -> None:
    clock = SimulatedClock(PRICED)
    bench = Workbench(pair(), clock=clock)
    source = DraftModelSource(runner=bench.runner, model="middle")
    parts = bench.parts(source=source, policy=Chain(gamma=3), verifier=MatchVerifier())
    decode_cases(parts, CASES[:2])
    target = parts.executor.counters
    target_s = 8e-3 * (target.passes + target.prefill_passes)
    assert clock.now() == pytest.approx(target_s + 2e-3 * parts.source.counters.passes)


@pytest.mark.parametrize("executor", ["local", "pipeline"])
def test_the_plan_places_every_model(executor: str) -> None:
    models = pair()
    overrides = [f"executor={executor}", *(["executor.stages=3"] if executor != "local" else [])]
    node = compose_config(["strategy=speculative", *overrides]).values["executor"]
    plan = plan_executor(node, models).plan
    assert plan.placements.keys() == models.weight_bytes.keys() == {"target", "draft", "middle"}
    assert plan.placements["middle"].ranks == (0,)
    total = sum(sum(placement.weight_bytes) for placement in plan.placements.values())
    assert total == pytest.approx(sum(models.weight_bytes.values()), abs=3)
