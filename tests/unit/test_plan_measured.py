"""Plans on a measured machine: the controller's time, trials of the last candidates, models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.optimize import nnls

from specdec.planning.acceptance import OfLaw
from specdec.planning.candidates import (
    PLAIN,
    Candidate,
    decoded_families,
    families,
    rescaled,
)
from specdec.planning.chains import ChainCell
from specdec.planning.controller import PROBES, fitted
from specdec.planning.layouts import Layout
from specdec.planning.measuring import Measured, typical
from specdec.planning.options import PlanOptions
from specdec.planning.search import Search
from specdec.planning.simulate import Simulator, Unit
from specdec.planning.trials import TRIALS_FILE, calibrated
from specdec.planning.writing import engine_flags

pytestmark = pytest.mark.slow

LAW = {"weights": [1.0], "top1": [0.7], "decay": [2.0], "miss": [0.0]}
COSTS = {
    "stage": {"tokens": [1, 64], "ms": [6.0, 12.0]},
    "draft": {"tokens": [1, 64], "ms": [1.0, 2.0]},
}


def measured(*batches: int) -> Measured:
    entries = [
        {"batch": b, "costs": {"stage": {"tokens": [1], "ms": [float(b)]}}, "note": ""}
        for b in batches
    ]
    return Measured.of(entries, stages=1, devices=1)


def test_the_controllers_time_is_a_nonnegative_least_squares_fit() -> None:
    """As scipy's, for counts of one and of several requests, mostly with some unknowns at 0."""
    rng = np.random.default_rng(4)
    num_zero = 0
    for _ in range(40):
        counts = rng.uniform(0.05, 1.0, (len(PROBES), int(rng.choice([4, 6]))))
        whole, missing = rng.uniform(1.0, 3.0, len(PROBES)), rng.standard_normal(len(PROBES))
        wanted, _ = nnls(counts / whole[:, None], missing / whole)
        found = fitted(counts, missing, whole)
        np.testing.assert_allclose(found, wanted, atol=1e-8)
        num_zero += int((found == 0.0).sum())
    assert num_zero > 40


class SlowMachine:
    """Real runs that take ``slower`` times as long as simulated, and twice that for trees."""

    def __init__(self, simulator: Simulator, slower: float) -> None:
        self.simulator, self.slower = simulator, slower
        self.made: dict[str, Candidate] = {}
        self.calls = 0

    def config(self, name: str, sizes: Any = None) -> dict[str, Any]:
        return {**self.made[name].config, "name": name}

    def decode(self, configs: Any, *, batch: int, count: int, length: int, **_: Any) -> Any:
        self.calls += 1
        found = []
        for config in configs:
            made = self.made[config["name"]]
            factor = self.slower * (2.0 if made.name == "fixed_width" else 1.0)
            units = self.simulator.units(made, count, length)
            found.append([scaled(unit, factor) for unit in units])
        return found


def scaled(unit: Unit, factor: float) -> Unit:
    return replace(unit, seconds=unit.seconds * factor, clock_s=unit.clock_s * factor)


@pytest.fixture
def search() -> Search:
    acceptance = OfLaw.of(LAW)
    machine = Measured.of([{"batch": 1, "costs": COSTS, "note": ""}], stages=1, devices=1)
    return Search(
        machine=machine,
        simulator=Simulator(acceptance.pair(), None, of="test", prompts=4),
        chosen=PlanOptions(profile="measured", prompts=4),
        requests=0.0,
        drawn=True,
        length=24,
        chain_length=0,
        report=lambda *_: None,
    )


def test_trials_replace_planned_times_by_those_of_runs(search: Search, tmp_path: Path) -> None:
    """A planted machine: everything takes 1.5 times as long, and trees 3 times."""
    acceptance = OfLaw.of(LAW)
    names = [PLAIN, "speculative", "fixed_width"]
    found, _ = families(acceptance.words, [], names, acceptance.pair())
    machine = search.machine
    made = [f.candidate(machine, Layout(), batch=1, context=1) for f in found]
    models: Any = SlowMachine(search.simulator, 1.5)
    models.made = {candidate.name: candidate for candidate in made}
    before = {c.name: search.times(c, 4).mean for c in made}
    path = tmp_path / TRIALS_FILE
    after = calibrated(made, search=search, models=models, path=path)
    ratios = {c.name: search.times(c, 4).mean / before[c.name] for c in after}
    assert ratios == pytest.approx({PLAIN: 1.5, "speculative": 1.5, "fixed_width": 3.0})
    assert "1.50 to 3.00 of their simulated times" in search.notes[-1], "nothing about its speed"
    calls = models.calls
    again = calibrated(made, search=search, models=models, path=path)
    assert models.calls == calls, "the file has all of them"
    assert [c.key for c in again] == [c.key for c in after]


def test_flags_name_the_method_of_the_drafter(search: Search) -> None:
    acceptance = OfLaw.of(LAW)
    found, _ = families(acceptance.words, [], ["speculative"], acceptance.pair())
    winner = found[-1].candidate(search.machine, Layout(), batch=1, context=1)
    shape: dict[str, Any] = {"batch": 1, "context": 1, "tokens_per_s": 2.0, "layout": Layout()}
    cell = ChainCell(draft_tokens=5, plain_tokens_per_s=1.0, **shape)
    flags = engine_flags(cell, "HEAD", "eagle3", winner)
    assert '"method": "eagle3", "model": "HEAD", "num_speculative_tokens": 5' in flags["vLLM"]
    assert "--speculative-algorithm EAGLE3 " in flags["SGLang"]
    flags = engine_flags(cell, "HEAD", "ngram", winner)
    assert '"prompt_lookup_max"' in flags["vLLM"]
    assert "HEAD" not in flags["vLLM"]
    assert "SGLang" not in flags
    plain = replace(cell, draft_tokens=0)
    assert "no speculation" in engine_flags(plain, "HEAD", "eagle", winner)["vLLM"]
    copied, _ = decoded_families(["model=tiny"], [], ["prompt_lookup"], measured=False)
    lookup = copied[0].candidate(search.machine, Layout(), batch=1, context=1)
    flags = engine_flags(cell, "DRAFT", "draft_model", lookup)
    assert '"method": "ngram", "num_speculative_tokens": 8' in flags["vLLM"]


def test_scaled_costs_scale_all_times(search: Search) -> None:
    """What is copied is what a simulation with these costs gives, for chains and for trees."""
    acceptance = OfLaw.of(LAW)
    found, _ = families(acceptance.words, [], ["speculative", "best_first"], acceptance.pair())
    other = Simulator(acceptance.pair(), None, of="test", prompts=4)
    for family in found:
        made = family.candidate(search.machine, Layout(), batch=1, context=1)
        slow = rescaled(made, dict.fromkeys(COSTS, 1.7))
        search.simulator.units(made, 4, 24)
        tokens = search.simulator.simulated_tokens
        search.simulator.copy_scaled(made, slow, 1.7)
        copied = search.simulator.units(slow, 4, 24)
        assert search.simulator.simulated_tokens == tokens, "nothing was decoded"
        for unit, expected in zip(copied, other.units(slow, 4, 24), strict=True):
            assert unit.emitted == expected.emitted
            assert unit.answers == expected.answers
            assert unit.seconds == pytest.approx(expected.seconds, abs=1e-8)
            assert unit.clock_s == pytest.approx(expected.clock_s, abs=1e-8)


def test_memory_of_a_layout_is_that_of_its_fullest_device() -> None:
    memory = {"target_gb": 8.0, "draft_gb": 1.0, "kv_kb": 100.0, "limit_gb": 16.0}
    entry = {"batch": 1, "costs": COSTS, "note": "", "memory": memory}
    machine = Measured.of([entry], stages=1, devices=1)
    assert machine.limit_gb == 16.0
    assert machine.memory_gb(Layout(), 4, 5000) == pytest.approx(8.0 + 2.0 + 1.0)
    staged = Layout(stages=4, own_draft=True)
    assert machine.memory_gb(staged, 4, 5000) == pytest.approx(10.0 / 4)
    assert measured(1).memory_gb(Layout(), 1, 1) is None, "measured before memory was stated"


def test_repeated_runs_count_by_mean_or_median() -> None:
    unit = Unit(
        requests=1, tokens=10, seconds=1.0, emitted=11, clock_s=1.2, answers=4, hits=2, draft_s=0.2,
        hidden_s=0.0,
    )  # fmt: skip
    pair = typical([scaled(unit, 3.0), unit])
    assert (pair.seconds, pair.clock_s) == pytest.approx((2.0, 2.4))
    assert (pair.tokens, pair.answers) == (10, 4)
    three = typical([scaled(unit, 5.0), unit, scaled(unit, 1.1)])
    assert (three.seconds, three.clock_s) == pytest.approx((1.1, 1.32))
