"""Whether other work on the machine disturbed a measurement: wall time beside CPU time.

A measurement is one prompt decoded once by one strategy. docs/metrics.md states the rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

MAX_WAITING = 0.05
"""Largest number of threads, on average, that may have waited for a CPU."""

MAX_STOLEN_SHARE = 0.10
"""Largest share of the wall time for which a virtual machine may have had no CPU."""

MIN_CPU_SHARE = 0.75
"""Smallest CPU time per wall time of processes that have nothing to wait for."""

MAX_SLOWDOWN = 1.5
"""Largest ratio of a prompt's time to that of its fastest repeat."""

_MIN_DIFFERENCE_S = 0.01  # between repeats; the timer and Python's garbage collection take less
_TICK_ERROR_S = 0.02  # the CPU time of other processes is counted in ticks of 10 ms
_DIGITS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuTimes:
    """What the processes of a run did during one measurement, and the other processes.

    Attributes:
        wall_s: seconds of wall time.
        cpu_s: CPU seconds of the run's processes on this machine, all threads.
        delay_s: seconds in which their threads were ready but had no CPU, summed over threads;
            None where the system does not say.
        others_s: CPU seconds of all other processes; None where the system does not say.
        stolen_s: CPU seconds that the host of a virtual machine gave to others; None likewise.
        preemptions: involuntary context switches of the controller; None likewise.
        threads: threads of the run's processes that computed during the measurement.
        cpus: CPUs that the processes may use.
        waits: whether the processes also wait for something else than a CPU, such as a GPU or
            ranks on other machines.
    """

    wall_s: float
    cpu_s: float
    delay_s: float | None = None
    others_s: float | None = None
    stolen_s: float | None = None
    preemptions: int | None = None
    threads: int = 1
    cpus: int = 1
    waits: bool = False

    def to_json(self) -> dict[str, Any]:
        """Plain values, times rounded to microseconds."""
        values = asdict(self)
        return {k: round(v, _DIGITS) if isinstance(v, float) else v for k, v in values.items()}

    @property
    def disturbance(self) -> str:
        """Why the times do not count, as a clause; "" if they do."""
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
        """Whether the run's own threads wait for each other, and other processes do little."""
        if self.threads <= self.cpus or self.others_s is None:
            return False
        return self.others_s <= MAX_WAITING * self.wall_s + _TICK_ERROR_S


def slow_repeats(seconds: Mapping[int, float]) -> dict[int, str]:
    """Repeats of one prompt that took much longer than the fastest one, which did the same work.

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
    """The metrics ``disturbed`` and ``disturbed_because`` of a row.

    Args:
        reasons: per measurement why it is disturbed; "" if it is not.
    """
    found = [reason for reason in reasons if reason]
    return {"disturbed": len(found), "disturbed_because": found[0] if found else None}
