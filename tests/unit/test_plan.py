"""The parts of ``specdec plan``: machines, acceptance, intervals, trials, flags."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec.models.bundled import record_path
from specdec.pairs.record import read_record
from specdec.planning.acceptance import of_law, of_record
from specdec.planning.candidates import (
    PLAIN,
    Candidate,
    Simulator,
    Times,
    Unit,
    effective,
    interval,
    presets,
)
from specdec.planning.job import plan_request
from specdec.planning.machines import (
    DoesNotFit,
    Layout,
    Machine,
    Profiled,
    layouts,
    machine_of,
)
from specdec.planning.measuring import calibrated, typical
from specdec.planning.options import PlanOptions
from specdec.planning.search import Search
from specdec.runs.progress import Progress
from tests.unit.test_plan_runs import MACHINE

LAW = of_law({"weights": [1.0], "top1": [0.7], "decay": [2.0], "miss": [0.0]})
COSTS = {
    "stage": {"tokens": [1, 64], "ms": [6.0, 12.0]},
    "draft": {"tokens": [1, 64], "ms": [1.0, 2.0]},
}
HERE = Profiled(
    name="measured", devices=1, stages=1, by_batch={1: COSTS}, memory_gb=16.0, target_gb=8.0,
    draft_gb=1.0, kv_kb=100.0,
)  # fmt: skip


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    path = tmp_path / "cluster.yaml"
    path.write_text(f"{MACHINE}kv_kb: 320\n")
    return machine_of(PlanOptions(profile=str(path)))


def test_layouts_use_all_devices() -> None:
    found = layouts(8, own_draft=True, staged=True, copies=False)
    assert all(layout.devices <= 8 for layout in found)
    assert Layout(stages=7, own_draft=True) in found
    assert Layout(stages=1, degree=4, draft_degree=4, own_draft=True) in found
    assert {c.replicas for c in layouts(5, own_draft=True, staged=False, copies=True)} == {2, 3, 4}


def test_a_described_machine_is_a_roofline(machine: Machine) -> None:
    whole, half = (machine.costs(Layout(stages=s), 1, 1)["stage"]["ms"] for s in (2, 4))
    assert half[0] == pytest.approx(whole[0] / 2, rel=1e-4)
    assert whole[0] * 2 > 70.0 / 900.0 * 1e3, "weights are read once per pass"
    assert whole == sorted(whole)
    assert whole[-1] > 4 * whole[0], "large passes are bound by arithmetic"
    with pytest.raises(DoesNotFit, match="GB on a device"):
        machine.costs(Layout(), 1, 512)
    short, long = (machine.costs(Layout(stages=4), 4, c)["stage"]["ms"][0] for c in (512, 8192))
    assert long > short, "keys and values are read too"


def test_memory_of_a_layout_is_that_of_its_fullest_device() -> None:
    assert HERE.used_gb(Layout(), 4, 5000) == pytest.approx(8.0 + 2.0 + 1.0)
    assert HERE.used_gb(Layout(stages=4, own_draft=True), 4, 5000) == pytest.approx(10.0 / 4)
    assert replace(HERE, memory_gb=None).used_gb(Layout(), 1, 1) is None


def test_a_profile_is_scaled_to_other_stages() -> None:
    machine = machine_of(PlanOptions(profile="specpipe_8x3090", devices=17))
    eight, sixteen = (machine.costs(Layout(stages=s), 1, 1)["stage"]["ms"][0] for s in (8, 16))
    assert (eight, sixteen) == (36.8, 18.4)
    with pytest.raises(DoesNotFit, match="not to hold it"):
        machine.costs(Layout(stages=4), 1, 1)


def test_a_profile_of_unlike_devices_keeps_its_stages() -> None:
    machine = machine_of(PlanOptions(profile="vllm_2server", devices=17))
    eight = Layout(stages=8)
    stage = machine.costs(eight, 1, 1)["stage"]
    assert stage["ms"][0] * sum(stage["devices"]) == pytest.approx(22.7 * 4 * (1 + 0.93))
    with pytest.raises(DoesNotFit, match="differ"):
        machine.costs(Layout(stages=16), 1, 1)


def test_hit_rates_are_those_of_laws_and_records() -> None:
    assert LAW.hit_rate == pytest.approx(0.7)
    record = of_record({"record": "bundled:humaneval"})
    ranks = [r.ranks for r in read_record(record_path("bundled:humaneval")).requests]
    assert record.hit_rate == pytest.approx((np.concatenate(ranks) == 0).mean())


@pytest.mark.slow
def test_the_log_of_an_engine_is_an_input(tmp_path: Path) -> None:
    """Accepted lengths of a draft that is right at 70 % of the positions, in passes of 5."""
    rng = np.random.default_rng(0)
    hits = rng.random((12, 200, 5)) < 0.7
    path = tmp_path / "log.json"
    path.write_text(json.dumps((1 + np.cumprod(hits, axis=2).sum(axis=2)).tolist()))
    words = [f"acceptance={path}", "draft_tokens=5", "profile=specpipe_8x3090"]
    acceptance = plan_request(words).acceptance
    assert acceptance is not None
    assert acceptance.requests == 12
    assert acceptance.hit_rate == pytest.approx(0.7, abs=0.03)  # 5 standard errors


def test_intervals_count_the_requests_of_a_law() -> None:
    assert effective(24, 0) == 24
    assert effective(24, 24) == 12
    rng = np.random.default_rng(1)
    times = Times(rng.normal(1.0, 0.1, 24), np.ones(24))
    low, high = interval(times.resampled(24))
    wide_low, wide_high = interval(times.resampled(6))
    assert wide_high - wide_low == pytest.approx(2 * (high - low), rel=0.15)
    covered = 0
    for seed in range(200):  # 95 % intervals: 8 or fewer of 200 misses less than 1 in 10^4 ... 24
        drawn = Times(np.random.default_rng(seed).normal(1.0, 0.1, 24), np.ones(24))
        low, high = interval(drawn.resampled(24))
        covered += low <= 1.0 <= high
    assert 176 <= covered <= 199


class SlowMachine:
    """Real runs that take 1.5 times as long as simulated, and trees 3 times."""

    def __init__(self, simulator: Simulator, made: list[Candidate]) -> None:
        self.simulator, self.made = simulator, {candidate.name: candidate for candidate in made}
        self.calls = 0

    def config(self, name: str) -> dict[str, Any]:
        return {**self.made[name].config, "name": name}

    def decode(self, configs: Any, *, count: int, length: int, **_: Any) -> Any:
        self.calls += 1
        factors = {name: 3.0 if name == "fixed_width" else 1.5 for name in self.made}
        units = (
            (c["name"], self.simulator.units(self.made[c["name"]], count, length)) for c in configs
        )
        return [[scaled(unit, factors[name]) for unit in of] for name, of in units]


def scaled(unit: Unit, factor: float) -> Unit:
    return replace(unit, seconds=unit.seconds * factor, clock_s=unit.clock_s * factor)


def test_trials_replace_planned_times_by_those_of_runs(tmp_path: Path) -> None:
    search = Search(
        machine=HERE, simulator=Simulator(LAW.pair, prompts=4),
        chosen=PlanOptions(profile="measured", prompts=4), requests=0.0, length=24,
        progress=Progress(),
    )  # fmt: skip
    found, _ = presets(LAW.overrides, [], ["speculative", "fixed_width"], LAW.pair)
    made = [preset.on(HERE, Layout(), batch=1, context=1) for preset in found]
    models: Any = SlowMachine(search.simulator, made)
    before = {c.name: search.times(c, 4).mean for c in made}
    path = tmp_path / "trials.json"
    after = calibrated(made, search=search, models=models, path=path)
    ratios = {c.name: search.times(c, 4).mean / before[c.name] for c in after}
    assert ratios == pytest.approx({PLAIN: 1.5, "speculative": 1.5, "fixed_width": 3.0})
    assert "1.50 to 3.00 of their simulated times" in search.notes[-1]
    calls = models.calls
    again = calibrated(made, search=search, models=models, path=path)
    assert models.calls == calls, "the file has all of them"
    assert [c.key for c in again] == [c.key for c in after]
    # What was copied is what a simulation with these costs gives, for chains and for trees.
    other = Simulator(LAW.pair, prompts=4)
    for candidate in after:
        units = zip(search.units(candidate, 4), other.units(candidate, 4, 24), strict=True)
        for unit, expected in units:
            assert (unit.emitted, unit.answers) == (expected.emitted, expected.answers)
            assert unit.seconds == pytest.approx(expected.seconds, abs=1e-8)
            assert unit.clock_s == pytest.approx(expected.clock_s, abs=1e-8)


def test_repeated_runs_count_by_mean_or_median() -> None:
    unit = Unit(
        requests=1, tokens=10, seconds=1.0, emitted=11, clock_s=1.2, answers=4, hits=2, draft_s=0.2,
        hidden_s=0.0,
    )  # fmt: skip
    pair = typical([scaled(unit, 3.0), unit])
    assert (pair.seconds, pair.clock_s) == pytest.approx((2.0, 2.4))
    three = typical([scaled(unit, 5.0), unit, scaled(unit, 1.1)])
    assert (three.seconds, three.clock_s) == pytest.approx((1.1, 1.32))
