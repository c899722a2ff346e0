"""Which rows of a batch are still alive: kept by the controller and by every rank alike.

Every rank hears of every batch, commit, open and close in the same order, so all agree on how many
rows cross each edge of the pipeline without telling each other. Rows are pruned when somebody asks,
by each request's latest commit alone: what a commit keeps, every earlier one has kept too.

A *tick* is the executor's own step number. It never starts again, while steps do with each run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from specdec.executors.row_packing import InFlight
from specdec.types import Batch, Commit


class Ledger:
    """Batches in flight, the open requests and the latest commit of each."""

    def __init__(self) -> None:
        self._batches: dict[int, Batch] = {}
        self._opened: dict[int, int] = {}
        self._latest: dict[int, tuple[int, Commit]] = {}

    def enter(
        self, tick: int, batch: Batch, opens: Iterable[int] = (), closes: Iterable[int] = ()
    ) -> None:
        """Takes what a step brings: requests that ended, requests that begin, and its batch."""
        for request_id in closes:
            self._opened.pop(request_id, None)
            self._latest.pop(request_id, None)
        for request_id in opens:
            self._opened[request_id] = tick
        if batch.num_tokens:
            self._batches[tick] = batch

    def commit(self, tick: int, commits: Sequence[Commit]) -> None:
        """Takes the decisions at the end of step ``tick``; rows of finished requests are dead."""
        for commit in commits:
            self._latest[commit.request] = (tick, commit)
            if commit.finished:
                self._opened.pop(commit.request, None)

    def is_open(self, request_id: int, tick: int) -> bool:
        """Whether the request was open when the batch of ``tick`` entered, and still is."""
        return self._opened.get(request_id, tick + 1) <= tick

    def prune(self, tick: int, flight: InFlight) -> None:
        """Drops the rows of the batch that entered at ``tick`` which are dead by now."""
        requests = {rows.request for rows in flight.batch.trees}
        requests.update(chunk.request for chunk in flight.batch.prefills)
        closed = frozenset(r for r in requests if not self.is_open(r, tick))
        commits = {}
        for request_id in requests - closed:
            at, commit = self._latest.get(request_id, (-1, None))
            if commit is not None and at >= tick:
                commits[request_id] = commit
        if closed or commits:
            flight.prune(commits, closed)

    def alive(self, tick: int) -> Batch | None:
        """Live rows of the batch that entered at ``tick``; None where there are none."""
        batch = self._batches.get(tick)
        if batch is None:
            return None
        flight = InFlight(batch)
        self.prune(tick, flight)
        return flight.batch if flight.batch.num_tokens else None

    def take(self, tick: int) -> Batch | None:
        """As ``alive``; the batch leaves the books."""
        found = self.alive(tick)
        self._batches.pop(tick, None)
        return found
