"""Detects measurements that other work on the machine disturbed, from wall time and CPU time.

A measurement is one prompt decoded once by one strategy. docs/metrics.md states the rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

MAX_WAITING = 0.05
"""At most this many threads, on average, may have waited for a CPU."""

MAX_STOLEN_SHARE = 0.10
"""A virtual machine may have been without its CPUs for at most this share of the wall time."""

MIN_CPU_SHARE = 0.75
"""Processes that wait for nothing else must use at least this much CPU time per wall time."""

MAX_SLOWDOWN = 1.5
"""A prompt may take at most this many times as long as its fastest repeat."""

_MIN_DIFFERENCE_S = 0.01  # between repeats; the timer and Python's garbage collection take less
_TICK_ERROR_S = 0.02  # the CPU time of other processes is counted in ticks of 10 ms
_DIGITS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuTimes:
    """CPU use of a run's processes, and of the rest of the machine, during one measurement.

    Optional values are None where the operating system does not report them.
    """

    wall_s: float
    cpu_s: float  # over all threads of the run's processes on this machine
    delay_s: float | None = None  # threads were ready but had no CPU, summed over threads
    others_s: float | None = None  # CPU seconds of all other processes
    stolen_s: float | None = None  # CPU seconds that the host of a virtual machine gave to others
    preemptions: int | None = None  # involuntary context switches of the controller
    threads: int = 1  # threads of the run that computed during the measurement
    cpus: int = 1  # CPUs that the processes may use
    waits: bool = False  # also for something other than a CPU: a GPU, ranks on other machines

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        return {k: round(v, _DIGITS) if isinstance(v, float) else v for k, v in values.items()}

    @property
    def disturbance(self) -> str:
        """Explains in a clause why the times do not count; "" if they do."""
        if self.wall_s <= 0:
            return ""
        delay = (self.delay_s or 0.0) / self.wall_s
        if delay > MAX_WAITING and not self._crowd_themselves():
            return f"{delay:.2f} threads on average waited for a CPU"
        stolen = (self.stolen_s or 0.0) / self.wall_s
        if stolen > MAX_STOLEN_SHARE:
            return f"the machine's host took the CPUs for {stolen:.0%} of the time"
        if not self.waits and self.cpu_s < MIN_CPU_SHARE * self.wall_s:
            return f"no thread had a CPU during {1 - self.cpu_s / self.wall_s:.0%} of the time"
        return ""

    def _crowd_themselves(self) -> bool:
        """Whether the threads wait only for each other, having fewer CPUs than threads."""
        if self.threads <= self.cpus or self.others_s is None:
            return False
        return self.others_s <= MAX_WAITING * self.wall_s + _TICK_ERROR_S


def slow_repeats(seconds: Mapping[int, float]) -> dict[int, str]:
    """Finds repeats of one prompt that took much longer than the fastest, which did the same work.

    Args:
        seconds: repeat -> wall seconds, of one strategy and prompt.

    Returns:
        Repeat -> reason as a clause.
    """
    fastest = min(seconds.values(), default=0.0)
    return {
        repeat: f"it took {took / fastest:.1f} times as long as another repeat"
        for repeat, took in seconds.items()
        if fastest > 0 and took > MAX_SLOWDOWN * fastest and took - fastest > _MIN_DIFFERENCE_S
    }


def disturbed_figures(reasons: Iterable[str]) -> dict[str, Any]:
    """Returns the metrics ``disturbed`` and ``disturbed_because`` of a row.

    Args:
        reasons: ``CpuTimes.disturbance`` of each measurement.
    """
    found = [reason for reason in reasons if reason]
    return {"disturbed": len(found), "disturbed_because": found[0] if found else None}
