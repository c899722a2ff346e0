"""Tracks which rows of each submitted batch are still alive, on the controller and on every rank.

All ranks receive all batches, commits, opens and closes in the same order, so they agree on how
many rows cross each link of the pipeline without sending the counts. Rows are pruned on demand, by
the latest commit of each request alone: what it keeps, all earlier commits have kept too.

A *tick* is the executor's step number. It is never reset, unlike steps, which restart in each run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from specdec.executors.stage import InFlight
from specdec.types import Batch, Commit


class InFlightRows:
    """Batches in flight, the open requests and the latest commit of each."""

    def __init__(self) -> None:
        self._batches: dict[int, Batch] = {}
        self._opened: dict[int, int] = {}
        self._latest: dict[int, tuple[int, Commit]] = {}

    def enter(
        self, tick: int, batch: Batch, opens: Iterable[int] = (), closes: Iterable[int] = ()
    ) -> None:
        """Records a step's batch, and the requests that it opens and closes."""
        for request_id in closes:
            self._opened.pop(request_id, None)
            self._latest.pop(request_id, None)
        for request_id in opens:
            self._opened[request_id] = tick
        if batch.num_tokens:
            self._batches[tick] = batch

    def commit(self, tick: int, commits: Sequence[Commit]) -> None:
        """Records the commits at the end of step ``tick``; rows of finished requests die."""
        for commit in commits:
            self._latest[commit.request] = (tick, commit)
            if commit.finished:
                self._opened.pop(commit.request, None)

    def is_open(self, request_id: int, tick: int) -> bool:
        """Returns whether the request was open at ``tick``, and still is."""
        return self._opened.get(request_id, tick + 1) <= tick

    def prune(self, tick: int, flight: InFlight) -> None:
        """Drops the dead rows of the batch that was submitted at ``tick``."""
        requests = {rows.request for rows in flight.batch.trees}
        requests.update(chunk.request for chunk in flight.batch.prefills)
        closed = {request_id for request_id in requests if not self.is_open(request_id, tick)}
        latest = {r: self._latest[r] for r in requests - closed if r in self._latest}
        flight.prune({r: commit for r, (at, commit) in latest.items() if at >= tick}, closed)

    def alive(self, tick: int) -> Batch | None:
        """Returns the live rows of the batch submitted at ``tick``; None if there are none."""
        if tick not in self._batches:
            return None
        flight = InFlight(self._batches[tick])
        self.prune(tick, flight)
        return flight.batch if flight.batch.num_tokens else None

    def take(self, tick: int) -> Batch | None:
        """Returns the live rows like ``alive``, and removes the batch."""
        batch = self.alive(tick)
        self._batches.pop(tick, None)
        return batch
