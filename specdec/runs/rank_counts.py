"""Cumulative counts of all ranks, in this process and in others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from specdec.clocks import Clock, ClockReport
    from specdec.interfaces import Executor
    from specdec.metrics.results import RunTotals


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCounts:
    """Cumulative counts; subtract an earlier instance for those of an interval.

    Attributes:
        busy_s: stage's rank -> seconds of work on the run's clock; None if unknown.
        pieces, overruns: pieces of paced work and those that took too long, over all ranks; None on
            other clocks.
        bytes_sent: between ranks; None if all ranks are in one process.
        draft_s, draft_hidden_s: seconds of the controller's draft work, and those of them during
            target work; None on a measured clock, where the meter gives the first.
        reports: reports of the ranks' wall clocks, spans included.
    """

    busy_s: Mapping[int, float] | None = None
    pieces: int | None = None
    overruns: int | None = None
    bytes_sent: int | None = None
    draft_s: float | None = None
    draft_hidden_s: float | None = None
    reports: tuple[ClockReport, ...] = field(default=(), repr=False)

    @staticmethod
    def of(clock: Clock, executor: Executor) -> RankCounts:
        """Reads the counts of every rank; one message to each other process."""
        from specdec.clocks import ClockKind, ClockReport, WallClock

        drafted, busy_s = getattr(clock, "drafted", None), getattr(clock, "busy_s", None)
        if clock.kind is ClockKind.SIMULATED:
            return RankCounts(
                busy_s=None if busy_s is None else {r: s for r, s in busy_s.items() if r > 0},
                draft_s=None if drafted is None else drafted.total_s,
                draft_hidden_s=None if drafted is None else drafted.hidden_s,
            )
        read = getattr(executor, "reports", None)
        answers: list[dict[str, Any]] = [] if read is None else read()
        workers = [ClockReport.from_json(report["clock"]) for report in answers]
        own = [clock.report()] if isinstance(clock, WallClock) else []
        reports = (*own, *workers)
        paced = clock.kind is ClockKind.PACED
        sent = sum(report["bytes_sent"] for report in answers) + getattr(executor, "bytes_sent", 0)
        return RankCounts(
            busy_s={r.rank: r.busy_s for r in workers} if workers else None,
            pieces=sum(r.pieces for r in reports) if paced else None,
            overruns=sum(r.overruns for r in reports) if paced else None,
            bytes_sent=sent if workers else None,
            draft_s=None if drafted is None else drafted.total_s,
            draft_hidden_s=None if drafted is None else drafted.hidden_s,
            reports=reports,
        )

    def book(self, totals: RunTotals, before: RankCounts) -> None:
        """Writes the differences from ``before`` into a run's totals."""
        if self.busy_s is not None and before.busy_s is not None:
            earlier = before.busy_s
            totals.stage_busy_s = {r: s - earlier.get(r, 0.0) for r, s in self.busy_s.items()}
        totals.paced_pieces = _since(self.pieces, before.pieces)
        totals.overruns = _since(self.overruns, before.overruns)
        totals.bytes_sent = _since(self.bytes_sent, before.bytes_sent)
        if self.draft_s is not None and before.draft_s is not None:
            totals.draft_total_s = self.draft_s - before.draft_s
        totals.draft_hidden_s = _since(self.draft_hidden_s, before.draft_hidden_s)


_Count = TypeVar("_Count", int, float)


def _since(now: _Count | None, before: _Count | None) -> _Count | None:
    return None if now is None or before is None else now - before
