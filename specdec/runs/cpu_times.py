"""Reads from the operating system the CPU times of a run's processes and of all others."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, process_time

from specdec.metrics.contention import CpuTimes

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

_COMPUTING_SHARE = 0.05  # share of the wall time from which a thread counts as computing
_NANO = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuReading:
    """Cumulative times at one moment; see ``CpuTimes`` for what None means.

    Attributes:
        cpu_s: CPU time of this process.
        threads: (process id, thread id) -> (CPU seconds, seconds waiting for a CPU), of this
            process and of the ranks on this machine; empty if the system does not say.
        busy_s, stolen_s: of all CPUs and processes; time that the hypervisor gave to others.
        preemptions: involuntary context switches of this process.
    """

    wall_s: float
    cpu_s: float
    threads: Mapping[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    busy_s: float | None = None
    stolen_s: float | None = None
    preemptions: int | None = None


def read_cpu(ranks: Sequence[int] = (), proc: Path = Path("/proc")) -> CpuReading:
    """Reads the current times of this process and of the process ids ``ranks``.

    This takes about 20 microseconds per thread on Linux.
    """
    own, threads = os.getpid(), dict[tuple[int, int], tuple[float, float]]()
    for pid in (own, *ranks):
        for file in (proc / str(pid) / "task").glob("*/schedstat"):
            try:
                ran, waited, *_ = file.read_text().split()
            except (OSError, ValueError):  # the thread has ended, or the kernel does not count
                continue
            threads[pid, int(file.parent.name)] = int(ran) * _NANO, int(waited) * _NANO
    busy_s = stolen_s = None
    try:
        ticks = [int(word) for word in (proc / "stat").read_text().split("\n", 1)[0].split()[1:]]
        user, nice, system, _idle, _disk, irq, softirq, stolen = ticks[:8]
        per_s = os.sysconf("SC_CLK_TCK")
        busy_s = (user + nice + system + irq + softirq) / per_s
        stolen_s = stolen / per_s
    except (OSError, ValueError):  # not Linux
        pass
    switches = None if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
    return CpuReading(
        wall_s=perf_counter(),
        cpu_s=process_time(),
        threads=threads,
        busy_s=busy_s,
        stolen_s=stolen_s,
        preemptions=switches,
    )


class CpuMeter:
    """Measures the CPU times of intervals, each from ``start`` to ``stop``."""

    def __init__(
        self,
        *,
        ranks: Sequence[int] = (),
        waits: bool = False,
        read: Callable[[Sequence[int]], CpuReading] = read_cpu,
        cpus: int | None = None,
    ) -> None:
        """Takes the process ids of the run's other processes on this machine.

        ``waits`` is explained at ``CpuTimes``; ``cpus`` of None asks the system.
        """
        self._ranks, self._waits, self._read = tuple(ranks), waits, read
        self._cpus = cpus or _usable_cpus()
        self._began: CpuReading | None = None

    def start(self) -> None:
        self._began = self._read(self._ranks)

    def stop(self) -> CpuTimes:
        assert self._began is not None, "stop() before start()"
        before, now = self._began, self._read(self._ranks)
        wall_s = now.wall_s - before.wall_s
        spent = [
            (pid, ran - ran_before, waited - waited_before)
            for (pid, thread), (ran, waited) in now.threads.items()
            for ran_before, waited_before in [before.threads.get((pid, thread), (0.0, 0.0))]
        ]
        cpu_s = now.cpu_s - before.cpu_s
        cpu_s += sum(ran for pid, ran, _ in spent if pid in self._ranks)
        busy_s = _difference(now.busy_s, before.busy_s)
        computing = sum(ran > _COMPUTING_SHARE * wall_s for _, ran, _ in spent)
        switches = _difference(now.preemptions, before.preemptions)
        return CpuTimes(
            wall_s=wall_s,
            cpu_s=cpu_s,
            delay_s=sum(waited for *_, waited in spent) if spent else None,
            others_s=None if busy_s is None else max(0.0, busy_s - cpu_s),
            stolen_s=_difference(now.stolen_s, before.stolen_s),
            preemptions=None if switches is None else int(switches),
            threads=max(1, computing),
            cpus=self._cpus,
            waits=self._waits,
        )


def _difference(now: float | None, before: float | None) -> float | None:
    return None if now is None or before is None else now - before


def _usable_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
