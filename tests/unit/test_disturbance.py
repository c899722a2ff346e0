"""Measurements that other work on the machine disturbs: by which rule, and from what is read."""

import os
from pathlib import Path
from typing import Any

import pytest

from specdec.runs import cpu_times
from specdec.runs.cpu_times import CpuMeter, disturbance

QUIET = {
    **{"wall_s": 1.0, "cpu_s": 1.9, "delay_s": 0.006, "others_s": 0.01, "stolen_s": None},
    **{"preemptions": None, "threads": 2, "cpus": 2, "waits": False},
}
TWO_LOOPS = {"cpu_s": 0.9, "delay_s": 1.1, "others_s": 1.1}
UNKNOWN = {"delay_s": None, "others_s": None}


@pytest.mark.parametrize(
    ("changes", "clause"),
    [
        ({}, ""),
        (TWO_LOOPS, "1.10 threads on average waited"),
        # Threads that spin while they wait for another one hide it from the CPU time.
        ({**TWO_LOOPS, "cpu_s": 1.9}, "1.10 threads"),
        ({"delay_s": 0.051}, "0.05 threads"),
        ({"delay_s": 0.049}, ""),
        # More threads than CPUs wait for each other, and nobody else is there.
        ({"threads": 8, "delay_s": 3.0}, ""),
        ({"threads": 8, "delay_s": 3.0, "others_s": 0.5}, "3.00 threads"),
        ({"threads": 8, "delay_s": 3.0, "others_s": None}, "3.00 threads"),
        ({"stolen_s": 0.2}, "host took the CPUs for 20%"),
        # Where the system says nothing, a process that computes must have a CPU.
        ({**UNKNOWN, "cpu_s": 0.98}, ""),
        ({**UNKNOWN, "cpu_s": 0.6}, "no thread had a CPU during 40%"),
        ({**UNKNOWN, "cpu_s": 0.1, "waits": True}, ""),
        ({"wall_s": 0.0, "cpu_s": 0.0}, ""),
    ],
)
def test_each_rule_at_its_bound(changes: dict[str, Any], clause: str) -> None:
    found = disturbance({**QUIET, **changes})
    assert clause in found
    assert bool(found) == bool(clause)


def write_proc(proc: Path, threads: dict[tuple[int, int], str], ticks: str) -> None:
    for (pid, thread), text in threads.items():
        folder = proc / str(pid) / "task" / str(thread)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "schedstat").write_text(text)
    (proc / "stat").write_text(f"cpu  {ticks}\ncpu0 1 2\n")


def test_an_interval_of_several_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process and a rank, of which a thread has begun in between; one is unreadable."""
    own, seconds = os.getpid(), [(100.0, 50.0), (101.0, 50.9)]
    before = {(own, own): "5000000000 1000000000 9", (11, 11): "2000000000 500000000 9"}
    after = {(own, own): "5900000000 1250000000 9", (11, 11): "2500000000 500000000 9"}
    monkeypatch.setattr(cpu_times, "perf_counter", lambda: seconds[0][0])
    monkeypatch.setattr(cpu_times, "process_time", lambda: seconds[0][1])
    meter = CpuMeter([11], proc=tmp_path)
    write_proc(tmp_path, {**before, (11, 13): "broken"}, "100 0 50 900 7 1 2 30 0 0")
    meter.start()
    del seconds[0]
    write_proc(tmp_path, {**after, (11, 12): "250000000 125000000 9"}, "350 0 100 900 7 1 2 80 0 0")
    times = meter.stop()
    assert times["wall_s"] == 1.0
    assert times["cpu_s"] == pytest.approx(1.65)  # its own process clock, and the rank's threads
    assert times["delay_s"] == pytest.approx(0.375)
    assert times["others_s"] == pytest.approx(3.0 - 1.65)
    assert times["stolen_s"] == pytest.approx(0.5)
    assert times["threads"] == 3
    assert not times["waits"]


def test_where_the_system_says_nothing(tmp_path: Path) -> None:
    meter = CpuMeter(None, proc=tmp_path / "none")
    meter.start()
    times = meter.stop()
    assert [times[k] for k in ("delay_s", "others_s", "stolen_s")] == [None] * 3
    assert times["waits"], "ranks that another launcher started cannot be read"
