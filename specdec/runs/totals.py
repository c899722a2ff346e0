"""Keeps a run's totals per finished request, so that an interrupted run loses nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from specdec.clocks import Clock, ClockKind, ClockReport, WallClock
from specdec.compose.workbench import Parts
from specdec.interfaces import Executor
from specdec.metrics.results import RunTotals
from specdec.state import DecodeState

Counts = Mapping[str, Any]
"""Attribute of ``RunTotals`` -> cumulative count: a number, or numbers by key; None if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCounts:
    """Cumulative counts of all ranks, in this process and in others.

    Attributes:
        counts: on a measured clock without ``draft_total_s``, which the meter counts instead.
        reports: reports of the ranks' wall clocks, spans included.
    """

    counts: Counts
    reports: tuple[ClockReport, ...] = field(default=(), repr=False)

    @staticmethod
    def of(clock: Clock, executor: Executor) -> RankCounts:
        """Reads the counts of every rank, by one message to each other process."""
        simulated, paced = (clock.kind is k for k in (ClockKind.SIMULATED, ClockKind.PACED))
        answers = () if simulated else executor.reports()
        workers = [ClockReport.from_json(report["clock"]) for report in answers]
        shared = () if simulated else executor.draft_reports()
        followers = [ClockReport.from_json(report["clock"]) for report in shared]
        own = [clock.report()] if isinstance(clock, WallClock) else []
        reports = (*own, *workers, *followers)
        busy_s = {r.rank: r.busy_s for r in workers} if workers else None
        if simulated:
            charged = clock.busy_s
            busy_s = None if charged is None else {r: s for r, s in charged.items() if r > 0}
        sent = sum(report["bytes_sent"] for report in answers) + executor.bytes_sent
        counts = {
            "stage_busy_s": busy_s,
            "paced_pieces": sum(r.pieces for r in reports) if paced else None,
            "overruns": sum(r.overruns for r in reports) if paced else None,
            "bytes_sent": sent if workers else None,
            "draft_hidden_s": None,
        }
        if clock.drafted is not None:
            counts["draft_total_s"] = clock.drafted.total_s
            counts["draft_hidden_s"] = clock.drafted.hidden_s
        return RankCounts(counts=counts, reports=reports)


def differences(now: Counts, before: Counts) -> Counts:
    """Subtracts the counts name by name; None if either count is unknown."""

    def since(count: Any, earlier: Any) -> Any:
        if count is None or earlier is None:
            return None
        if isinstance(count, Mapping):
            return {key: number - earlier.get(key, 0) for key, number in count.items()}
        return count - earlier

    return {name: since(count, before[name]) for name, count in now.items()}


class RunBook:
    """Counts the work between two calls of ``take``; the sum over all calls is the run's.

    Counts of other processes are read at the end of the run only, since reading them stalls the
    pipeline; until then they are zero. ``ranks`` has the counts of all ranks as last read.
    """

    def __init__(self, parts: Parts, state: DecodeState, new_totals: Callable[[], RunTotals]):
        """Starts counting; ``new_totals`` creates totals with the run's flags and no counts."""
        self._parts = parts
        self._state = state
        self._new_totals = new_totals
        self._in_process = not parts.executor.distributed
        self._restart(self._read(ranks=True))

    def take(self, *, at_end: bool = False) -> RunTotals:
        """Returns the counts since the last call; ``at_end`` also reads other processes' counts."""
        totals, wall_s = self._new_totals(), self._now() - self._wall_s
        counts = self._read(ranks=at_end or self._in_process)
        totals.add_meter(self._parts.meter)
        for name, count in differences(counts, self._counts).items():
            setattr(totals, name, count)
        totals.wall_s = wall_s
        if self._parts.clock.kind is not ClockKind.SIMULATED:
            totals.clock_s = wall_s
        totals.kv_peak_tokens = self._state.load.kv_peak_tokens
        self._restart(counts)
        return totals

    def resume(self) -> None:
        """Excludes the wall time since the last ``take``, in which results were written."""
        self._wall_s = self._now()

    def _now(self) -> float:
        """Returns the wall time, without the intervals that ``MeasuredClock.skip`` left out."""
        clock = self._parts.clock
        return clock.now() if clock.kind is ClockKind.MEASURED else perf_counter()

    def _restart(self, counts: Counts) -> None:
        self._counts = counts
        self._parts.meter.reset()
        self.resume()

    def _read(self, *, ranks: bool) -> Counts:
        """Reads the cumulative counts; unless ``ranks``, repeats those of other processes."""
        parts, load = self._parts, self._state.load
        source, executor = parts.source.counters, parts.executor.counters
        clock_s = parts.clock.now()
        if ranks:
            self.ranks = RankCounts.of(parts.clock, parts.executor)
        return {
            "steps": self._state.step,
            "clock_s": clock_s,
            "target_passes": executor.passes,
            "target_rows": executor.rows,
            "prefill_passes": executor.prefill_passes,
            "prefill_rows": executor.prefill_rows,
            "draft_passes": source.passes,
            "draft_rows": source.rows,
            "draft_catch_up_rows": source.catch_up_rows,
            "draft_passes_by_level": dict(source.by_level),
            "request_steps": load.request_steps,
            "kv_token_steps": load.kv_token_steps,
            **self.ranks.counts,
        }
