"""``specdec plan``: inputs, search, answer, and the check against a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec.fitting import HitLaw
from specdec.metrics.speedup import expected_accepted
from specdec.planning.acceptance import OfLaw, OfRecord, chain_table
from specdec.planning.asked import planning_of
from specdec.planning.chains import chain_cell, crossover, round_ms
from specdec.planning.layouts import Layout, layouts
from specdec.planning.machines import DoesNotFit, machine_of
from specdec.planning.options import PlanOptions, split_words
from specdec.planning.search import Times, effective, interval

MACHINE = """\
devices: 4
memory_gb_s: 900
tflops: 180
memory_gb: 48
link_ms: 0.05
link_gb_s: 25
target_gb: 70
draft_gb: 2.5
"""


@pytest.fixture
def machine_file(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(MACHINE)
    return path


def options(**keys: Any) -> PlanOptions:
    return split_words([], keys)[0]


# Inputs


# Machines


def test_layouts_use_all_devices() -> None:
    found = list(layouts(8, own_draft=True, staged=True, copies=False))
    assert all(layout.devices <= 8 for layout in found)
    assert Layout(stages=7, own_draft=True) in found
    assert Layout(stages=1, degree=4, draft_degree=4, own_draft=True) in found
    assert {c.replicas for c in layouts(5, own_draft=True, staged=False, copies=True)} == {2, 3, 4}


def test_a_described_machine_is_a_roofline(machine_file: Path) -> None:
    machine = machine_of(options(profile=str(machine_file)))
    whole, half = (machine.costs(Layout(stages=s), 1, 512)["stage"]["ms"] for s in (2, 4))
    assert half[0] == pytest.approx(whole[0] / 2)
    assert whole[0] * 2 > 70.0 / 900.0 * 1e3, "weights are read once per pass"
    assert whole == sorted(whole)
    assert whole[-1] > 4 * whole[0], "large passes are bound by arithmetic"
    with pytest.raises(DoesNotFit, match="GB on a device"):
        machine.costs(Layout(), 1, 512)
    assert machine.memory_gb(Layout(stages=4), 1, 512) == pytest.approx(70 / 4 + 2.5)
    assert machine.memory_gb(Layout(stages=2, own_draft=True), 1, 512) == pytest.approx(35.0)


def test_context_is_priced_where_the_description_has_its_bytes(machine_file: Path) -> None:
    machine_file.write_text(MACHINE + "kv_kb: 320\n")
    machine = machine_of(options(profile=str(machine_file)))
    short, long = (machine.costs(Layout(stages=4), 4, c)["stage"]["ms"][0] for c in (512, 8192))
    assert long > short
    assert machine.prices_context
    grown = 4 * (8192 - 512) * 320e-6 / 4
    more = machine.memory_gb(Layout(stages=4), 4, 8192)
    less = machine.memory_gb(Layout(stages=4), 4, 512)
    assert more is not None
    assert less is not None
    assert more - less == pytest.approx(grown)


def test_a_profile_is_scaled_to_other_stages() -> None:
    machine = machine_of(options(profile="specpipe_8x3090", devices=17))
    eight, sixteen = (machine.costs(Layout(stages=s), 1, 1)["stage"]["ms"][0] for s in (8, 16))
    assert (eight, sixteen) == (36.8, 18.4)
    with pytest.raises(DoesNotFit, match="not to hold it"):
        machine.costs(Layout(stages=4), 1, 1)


# Acceptance


def test_tokens_per_pass_of_a_constant_law_are_the_formula() -> None:
    section = {"weights": [1.0], "top1": [0.8], "decay": [2.0], "miss": [0.0]}
    acceptance = OfLaw.of(section)
    for gamma, tokens in enumerate(chain_table(acceptance)):
        assert tokens == pytest.approx(1.0 + expected_accepted(0.8, gamma))


def test_shifted_laws_and_records_have_the_hit_rate_that_is_asked_for() -> None:
    section = {"weights": [0.5, 0.5], "top1": [0.9, 0.4], "decay": [2.0, 2.0], "miss": [0.0, 0.0]}
    assert isinstance(OfLaw.of(section).law, HitLaw)
    moved = OfLaw.of(section).shifted(-3.0)
    expected = np.mean([1 / (1 + np.exp(3.0) * (1 - p) / p) for p in (0.9, 0.4)])
    assert moved.hit_rate() == pytest.approx(expected)
    moved.pair()  # whose candidates are still in the order of their probability
    record = OfRecord.of("bundled:humaneval")
    for odds in (-1.0, 1.0):
        rate = record.hit_rate()
        expected = 1 / (1 + np.exp(-odds) * (1 - rate) / rate)
        assert record.shifted(odds).hit_rate() == pytest.approx(expected, abs=0.03)


# Search


def test_intervals_count_the_requests_of_a_law() -> None:
    assert effective(24, 0, True) == 24
    assert effective(24, 24, True) == 12
    assert effective(24, 24, False) == 24
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


def test_the_chain_table_crosses_over_to_plain_decoding(machine_file: Path) -> None:
    machine = machine_of(options(profile=str(machine_file)))
    table = chain_table(OfLaw.of({"weights": [1], "top1": [0.6], "decay": [2], "miss": [0]}))
    one = chain_cell(machine, table, 1, 512)
    start = crossover(machine, table, 512)
    assert one is not None
    assert one.draft_tokens > 0
    assert start is not None
    at, before = (chain_cell(machine, table, b, 512) for b in (start, start // 2))
    assert at is not None
    assert before is not None
    assert at.draft_tokens == 0 < before.draft_tokens
    costs = machine.costs(one.layout, 1, 512)
    seconds = 1e-3 * round_ms(costs, one.layout, 1, one.draft_tokens)
    assert one.tokens_per_s == pytest.approx(table[one.draft_tokens] / seconds)


def test_the_log_of_an_engine_is_an_input(tmp_path: Path) -> None:
    """Accepted lengths of a draft that is right at 70 % of the positions, in passes of 5."""
    rng = np.random.default_rng(0)
    hits = rng.random((12, 200, 5)) < 0.7
    lengths = 1 + np.cumprod(hits, axis=2).sum(axis=2)
    path = tmp_path / "log.json"
    path.write_text(json.dumps(lengths.tolist()))
    asked = planning_of([f"acceptance={path}", "draft_tokens=5", "profile=specpipe_8x3090"])
    assert asked.acceptance is not None
    assert asked.acceptance.requests == 12
    assert asked.acceptance.hit_rate() == pytest.approx(0.7, abs=0.03)  # 5 standard errors
    expected = 1.0 + expected_accepted(0.7, 5)
    assert asked.acceptance.tokens_per_pass(5) == pytest.approx(expected, rel=0.05)
