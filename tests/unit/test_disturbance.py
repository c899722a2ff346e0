"""Measurements that other work on the machine disturbs: found, repeated within bounds, said."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec.metrics import RunTotals, comparison_row
from specdec.metrics.contention import CpuTimes, disturbed_figures, slow_repeats
from specdec.metrics.paired import paired_figures
from specdec.report import RequestWriter, read_requests
from specdec.runs.cpu_times import CpuMeter, CpuReading, read_cpu
from specdec.runs.measurements import Measurements
from specdec.runs.runners import TokenPrompt
from tests.unit.test_metrics import make_result, timed_run

QUIET = CpuTimes(wall_s=1.0, cpu_s=1.9, delay_s=0.006, others_s=0.01, threads=2, cpus=2)
TWO_LOOPS = replace(QUIET, cpu_s=0.9, delay_s=1.1, others_s=1.1)


class TestRules:
    @pytest.mark.parametrize(
        ("times", "clause"),
        [
            (QUIET, ""),
            (TWO_LOOPS, "1.10 threads on average waited"),
            # Threads that spin while they wait for another one hide it from the CPU time.
            (replace(TWO_LOOPS, cpu_s=1.9), "1.10 threads"),
            (replace(QUIET, delay_s=0.051), "0.05 threads"),
            (replace(QUIET, delay_s=0.049), ""),
            # More threads than CPUs wait for each other, and nobody else is there.
            (replace(QUIET, threads=8, delay_s=3.0), ""),
            (replace(QUIET, threads=8, delay_s=3.0, others_s=0.5), "3.00 threads"),
            (replace(QUIET, threads=8, delay_s=3.0, others_s=None), "3.00 threads"),
            (replace(QUIET, stolen_s=0.2), "host took the CPUs for 20%"),
            # Where the system says nothing, a process that computes must have a CPU.
            (CpuTimes(wall_s=1.0, cpu_s=0.98), ""),
            (CpuTimes(wall_s=1.0, cpu_s=0.6), "no thread had a CPU during 40%"),
            (CpuTimes(wall_s=1.0, cpu_s=0.1, waits=True), ""),
            (CpuTimes(wall_s=0.0, cpu_s=0.0), ""),
        ],
    )
    def test_each_rule_at_its_bound(self, times: CpuTimes, clause: str) -> None:
        assert clause in times.disturbance
        assert bool(times.disturbance) == bool(clause)
        assert CpuTimes(**times.to_json()) == times

    def test_repeats_of_a_prompt(self) -> None:
        assert slow_repeats({}) == slow_repeats({0: 1.0}) == slow_repeats({0: 1.0, 1: 1.49}) == {}
        assert slow_repeats({0: 30.0, 1: 1.0, 2: 1.1}) == {
            0: "it took 30.0 times as long as another repeat"
        }
        assert slow_repeats({0: 0.001, 1: 0.010}) == {}  # too short to be told apart

    def test_figures_of_a_row(self) -> None:
        assert disturbed_figures(["", ""]) == {"disturbed": 0, "disturbed_because": None}
        assert disturbed_figures(["", "why", "x"]) == {"disturbed": 2, "disturbed_because": "why"}


def reading(second: float, **flags: Any) -> CpuReading:
    return CpuReading(wall_s=second, cpu_s=second, **flags)


class TestMeter:
    def test_an_interval_of_several_processes(self) -> None:
        """Processes 10 (this one) and 11 (a rank); a thread of the rank has begun in between."""
        before = {(10, 10): (5.0, 1.0), (11, 11): (2.0, 0.5)}
        after = {(10, 10): (5.9, 1.25), (11, 11): (2.5, 0.5), (11, 12): (0.25, 0.125)}
        readings = iter(
            [
                reading(100.0, threads=before, busy_s=50.0, stolen_s=1.0, preemptions=7),
                reading(101.0, threads=after, busy_s=53.0, stolen_s=1.5, preemptions=9),
            ]
        )
        asked = []

        def read(ranks: Any) -> CpuReading:
            asked.append(ranks)
            return next(readings)

        meter = CpuMeter(ranks=[11], read=read, cpus=4)
        meter.start()
        times = meter.stop()
        assert asked == [(11,), (11,)]
        assert times.wall_s == 1.0
        assert times.cpu_s == pytest.approx(1.75)  # its own process clock, and the rank's threads
        assert times.delay_s == pytest.approx(0.375)
        assert times.others_s == pytest.approx(1.25)
        assert (times.stolen_s, times.preemptions, times.threads, times.cpus) == (0.5, 2, 3, 4)

    def test_reads_what_linux_shows(self, tmp_path: Path) -> None:
        task = tmp_path / "77" / "task"
        for thread, text in ((77, "3000000000 500000000 9\n"), (78, "broken")):
            (task / str(thread)).mkdir(parents=True)
            (task / str(thread) / "schedstat").write_text(text)
        (tmp_path / "stat").write_text("cpu  100 0 50 900 7 1 2 30 0 0\ncpu0 1 2\n")
        read = read_cpu([77, 78], tmp_path)
        assert read.threads == {(77, 77): (pytest.approx(3.0), pytest.approx(0.5))}
        assert read.busy_s == pytest.approx(1.53)
        assert read.stolen_s == pytest.approx(0.3)
        nothing = read_cpu([77], tmp_path / "none")
        assert (nothing.threads, nothing.busy_s, nothing.stolen_s) == ({}, None, None)


class FakeMeter:
    """Returns scripted times."""

    def __init__(self, script: Iterator[CpuTimes]) -> None:
        self._script = script

    def start(self) -> None: ...

    def stop(self) -> CpuTimes:
        return next(self._script)


class FakeRunner:
    """Finishes every prompt at once and remembers which it was given."""

    parts = trace = None

    def __init__(self, name: str) -> None:
        self.name = name
        self.given: list[int] = []

    def run(self, prompts: Any, on_finish: Any, book: Any = None) -> RunTotals:
        for prompt in prompts:
            self.given.append(prompt.id)
            book(make_result([[1]], prompt_id=prompt.id), RunTotals())
        return RunTotals()


PROMPTS = [TokenPrompt(i, np.zeros(1, np.int64)) for i in range(8)]


def measured(
    path: Path, script: list[CpuTimes], *, repeats: int = 1
) -> tuple[Measurements, FakeRunner, list[str]]:
    """The prompts measured with this script of times; more of them are quiet."""

    def times() -> Iterator[CpuTimes]:
        yield from script
        while True:
            yield QUIET

    all_times, told = times(), list[str]()
    runner = FakeRunner("ar")
    with RequestWriter(path) as writer:
        store = Measurements(
            writer, new_meter=lambda _: FakeMeter(all_times), on_finish=told.append
        )  # type: ignore[arg-type, return-value]
        for repeat in range(repeats):
            store.resume("ar")
            for prompt in PROMPTS:
                if prompt.id not in store.records["ar"][repeat]:
                    store.measure(runner, repeat, [prompt])  # type: ignore[arg-type]
            store.measure_again([runner], PROMPTS)  # type: ignore[list-item]
        store.mark()
    return store, runner, told


class TestRepeating:
    def test_a_passing_disturbance_is_measured_again(self, tmp_path: Path) -> None:
        path = tmp_path / "r.jsonl"
        script = [QUIET, TWO_LOOPS, QUIET, TWO_LOOPS, *[QUIET] * 4, TWO_LOOPS]
        store, runner, told = measured(path, script)
        assert runner.given == [*range(8), 1, 3, 1]
        assert told == ["ar"] * 8  # progress counts prompts, not attempts
        assert store.figures("ar")["disturbed"] == 0
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert [line["id"] for line in lines if line["disturbed"]] == [1, 3, 1][:2]
        records = read_requests(path)
        assert sorted(record.result.id for record in records) == [*range(8)]
        assert not any(record.disturbed for record in records)

    def test_a_machine_that_stays_busy_costs_little_and_is_said(self, tmp_path: Path) -> None:
        path = tmp_path / "r.jsonl"
        store, runner, _ = measured(path, [TWO_LOOPS] * 100, repeats=2)
        assert len(runner.given) <= 2 * (8 + 4)
        figures = store.figures("ar")
        assert figures["disturbed"] == 16
        assert figures["disturbed_because"].startswith("1.10 threads")
        assert store.disturbed_ids("ar") == [{*range(8)}] * 2
        assert all(record.disturbed for record in read_requests(path))

    def test_a_slow_repeat_is_marked_though_its_cpu_time_looks_fine(self, tmp_path: Path) -> None:
        path = tmp_path / "r.jsonl"
        slow = replace(QUIET, wall_s=3.0, cpu_s=5.9)
        first, second = [slow, *[QUIET] * 7], [QUIET] * 8
        store, runner, _ = measured(path, [*first, *second, *[slow] * 50], repeats=2)
        assert runner.given[16:] == [0]  # once: it did not help
        assert store.disturbed() == {("ar", 0, 0): "it took 3.0 times as long as another repeat"}
        marked = [(r.repeat, r.result.id) for r in read_requests(path) if r.disturbed]
        assert marked == [(0, 0)]
        assert store.figures("ar")["disturbed"] == 1

    def test_a_resumed_run_measures_disturbed_prompts_again(self, tmp_path: Path) -> None:
        path = tmp_path / "r.jsonl"
        measured(path, [TWO_LOOPS] * 100)
        store, runner, told = measured(path, [])
        assert len(runner.given) == 4  # the bound of one call
        assert told == []
        assert store.figures("ar")["disturbed"] == 4


class TestReporting:
    def test_medians_of_paired_ratios(self) -> None:
        """One prompt that took 30 times its time moves the sums, and not the median."""
        ar, mine = timed_run(0.2), timed_run(0.1)
        slow = list(ar.results)
        slow[0] = make_result([[k] for k in range(10)], times=[6.0 * k for k in range(10)])
        row = comparison_row("x", [mine], [replace(ar, results=tuple(slow))])
        assert row["speedup_wall"] > 10
        assert row["speedup_prompt_median"] == pytest.approx(2.0)
        low, high = row["speedup_prompt_median_interval"]
        assert low == pytest.approx(2.0)
        assert high > 2.0
        assert comparison_row("x", [mine])["speedup_prompt_median"] is None

    def test_disturbed_repeats_are_left_out_where_others_remain(self) -> None:
        ar = [timed_run(0.2, prompts=1), timed_run(0.2, prompts=1)]
        mine = [timed_run(0.1, prompts=1), timed_run(0.4, prompts=1)]
        names = ("speedup_prompt_median", "speedup_prompt_median_interval")
        assert paired_figures(mine, ar) == dict(zip(names, (1.25, None), strict=True))
        assert paired_figures(mine, ar, [set(), {0}])[names[0]] == pytest.approx(2.0)
        assert paired_figures(mine, ar, [{0}, {0}])[names[0]] == pytest.approx(1.25)
