"""Totals of a run per finished request, so that an interrupted run loses nothing."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING

from specdec.clocks import ClockKind
from specdec.metrics.results import RunTotals
from specdec.runs.rank_counts import RankCounts

if TYPE_CHECKING:
    from specdec.compose.workbench import Parts
    from specdec.state import DecodeState


class RunBook:
    """Returns the counts since the last call; their sum is the run's.

    Counts of other processes are read at the end of the run only, since reading them stalls the
    pipeline; until then they are zero.

    Attributes:
        ranks: counts of all ranks when they were last read.
    """

    def __init__(self, parts: Parts, state: DecodeState, new_totals: Callable[[], RunTotals]):
        """Starts counting.

        Args:
            parts, state: of the run.
            new_totals: creates totals with the run's flags and no counts.
        """
        self._parts = parts
        self._state = state
        self._new_totals = new_totals
        self.ranks = RankCounts.of(parts.clock, parts.executor)
        self._in_process = getattr(parts.executor, "reports", None) is None
        self._restart(parts.clock.now())

    def take(self, *, at_end: bool = False) -> RunTotals:
        """The counts since the last call; ``at_end`` reads those of other processes."""
        parts, state, totals = self._parts, self._state, self._new_totals()
        now_s, clock_s = perf_counter(), parts.clock.now()
        totals.wall_s = now_s - self._wall_s
        simulated = parts.clock.kind is ClockKind.SIMULATED
        totals.clock_s = clock_s - self._clock_s if simulated else totals.wall_s
        totals.steps = state.step - self._step
        counters, before = parts.executor.counters, self._executor
        totals.target_passes = counters.passes - before.passes
        totals.target_rows = counters.rows - before.rows
        totals.prefill_passes = counters.prefill_passes - before.prefill_passes
        totals.prefill_rows = counters.prefill_rows - before.prefill_rows
        totals.request_steps = state.load.request_steps - self._load.request_steps
        totals.kv_token_steps = state.load.kv_token_steps - self._load.kv_token_steps
        totals.kv_peak_tokens = state.load.kv_peak_tokens
        totals.add_source(parts.source.counters.since(self._source))
        totals.add_meter(parts.meter)
        if at_end or self._in_process:
            ranks = RankCounts.of(parts.clock, parts.executor)
            ranks.book(totals, self.ranks)
            self.ranks = ranks
        else:
            self.ranks.book(totals, self.ranks)
        self._restart(clock_s)
        return totals

    def _restart(self, clock_s: float) -> None:
        parts, state = self._parts, self._state
        parts.meter.reset()
        self._source = deepcopy(parts.source.counters)
        self._executor = replace(parts.executor.counters)
        self._load = replace(state.load)
        self._step = state.step
        self._clock_s = clock_s
        self._wall_s = perf_counter()

    def resume(self) -> None:
        """Excludes the wall time since the last ``take``, in which results were written."""
        self._wall_s = perf_counter()
