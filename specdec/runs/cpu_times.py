"""Detects other work on the machine during a measurement, from the CPU times of a run's processes.

docs/metrics.md states the rules. A measurement is one prompt decoded once by one strategy.
"""

import os
import resource
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

from specdec.metrics.counters import difference
from specdec.report.provenance import usable_cpus

MAX_WAITING = 0.05  # threads that, on average, waited for a CPU
MAX_STOLEN_SHARE = 0.10  # of the wall time, in which the host of a virtual machine took the CPUs
MIN_CPU_SHARE = 0.75  # CPU time per wall time of processes that wait for nothing else

_TICK_ERROR_S = 0.02  # the CPU time of other processes is counted in ticks of 10 ms
_COMPUTING_SHARE = 0.05  # share of the wall time from which a thread counts as computing


def disturbance(cpu: Mapping[str, Any]) -> str:
    """Explains in a clause how other work disturbed ``CpuMeter``'s times ``cpu``; "" if not."""
    wall_s = cpu["wall_s"]
    if wall_s <= 0:
        return ""
    waiting, stolen = ((cpu[name] or 0.0) / wall_s for name in ("delay_s", "stolen_s"))
    # Threads that have fewer CPUs than they are wait for each other.
    crowded = cpu["threads"] > cpu["cpus"] and cpu["others_s"] is not None
    crowded = crowded and cpu["others_s"] <= MAX_WAITING * wall_s + _TICK_ERROR_S
    if waiting > MAX_WAITING and not crowded:
        return f"{waiting:.2f} threads on average waited for a CPU"
    if stolen > MAX_STOLEN_SHARE:
        return f"the machine's host took the CPUs for {stolen:.0%} of the time"
    if not cpu["waits"] and cpu["cpu_s"] < MIN_CPU_SHARE * wall_s:
        return f"no thread had a CPU during {1 - cpu['cpu_s'] / wall_s:.0%} of the time"
    return ""


class CpuMeter:
    """Measures the CPU times of intervals, each from ``start`` to ``stop``.

    Args:
        pids: the run's other processes on this machine; None if they cannot be read.
        waits: whether the run also waits for something other than a CPU: a GPU, other machines.
        proc: Linux's folder of processes.
    """

    def __init__(
        self, pids: Sequence[int] | None = (), *, waits: bool = False, proc: Path = Path("/proc")
    ) -> None:
        self._pids, self._waits, self._proc = tuple(pids or ()), waits or pids is None, proc

    def start(self) -> None:
        self._threads, self._counts = self._read()

    def stop(self) -> dict[str, Any]:
        """Returns the times since ``start``; None where the operating system does not report them.

        Keys: ``wall_s``; ``cpu_s`` of all threads; ``delay_s``, in which threads were ready but had
        no CPU; ``others_s``, CPU time of all other processes; ``stolen_s``, CPU time taken by the
        host; ``preemptions``; numbers of computing ``threads`` and usable ``cpus``; ``waits``.
        """
        threads, counts = self._read()
        spent = []
        for (pid, thread), (ran, waited) in threads.items():
            before = self._threads.get((pid, thread), (0.0, 0.0))
            spent.append((pid in self._pids, ran - before[0], waited - before[1]))
        cpu: dict[str, Any] = difference(counts, self._counts)
        cpu["cpu_s"] += sum(ran for theirs, ran, _ in spent if theirs)
        busy_s = cpu.pop("busy_s")
        cpu["delay_s"] = sum(waited for *_, waited in spent) if spent else None
        cpu["others_s"] = None if busy_s is None else max(0.0, busy_s - cpu["cpu_s"])
        computing = sum(ran > _COMPUTING_SHARE * cpu["wall_s"] for _, ran, _ in spent)
        rounded = {k: round(v, 6) if isinstance(v, float) else v for k, v in cpu.items()}
        cpus = usable_cpus() or os.cpu_count() or 1
        return rounded | {"threads": max(1, computing), "cpus": cpus, "waits": self._waits}

    def _read(self) -> tuple[dict[tuple[int, str], tuple[float, float]], dict[str, Any]]:
        """Returns (process, thread) -> seconds (computing, waiting), and the other counters."""
        threads = {}
        for pid in (os.getpid(), *self._pids):
            for file in (self._proc / str(pid) / "task").glob("*/schedstat"):
                with suppress(OSError, ValueError):  # the thread has ended
                    ran, waited, *_ = map(int, file.read_text().split())
                    threads[pid, file.parent.name] = ran * 1e-9, waited * 1e-9
        counts: dict[str, Any] = {"wall_s": perf_counter(), "cpu_s": process_time()}
        counts |= dict.fromkeys(("busy_s", "stolen_s"))
        with suppress(OSError, ValueError):  # not Linux
            ticks = map(int, (self._proc / "stat").read_text().split("\n", 1)[0].split()[1:9])
            user, nice, system, _idle, _disk, irq, softirq, stolen = ticks
            per_s = os.sysconf("SC_CLK_TCK")
            counts["busy_s"] = (user + nice + system + irq + softirq) / per_s
            counts["stolen_s"] = stolen / per_s
        counts["preemptions"] = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
        return threads, counts
