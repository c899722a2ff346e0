from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch

from specdec.attention.kv_cache import EMPTY, Rows, TreeCache
from specdec.clocks.meter import Meter
from specdec.distributed.draft_follower import CallList, Calls
from specdec.distributed.messages import Kind, Message
from specdec.distributed.plan import DraftPlan
from specdec.distributed.rank_groups import GroupHandle
from specdec.distributed.transport import PeerLost
from specdec.types import Commit, IntArray, TreeRows

if TYPE_CHECKING:
    from specdec.models.runner import ModelRunner, RunnerOutput
    from specdec.pairs import HuggingFacePair


class DraftGroup:
    """Ranks that share the draft model; rank 0 sends the others every call to replay.

    Attributes:
        runner: rank 0's share, with the interface of a whole draft's ``ModelRunner``.
        step: iteration of the decode loop, for the others' traces; set by the executor.
    """

    def __init__(
        self,
        *,
        plan: DraftPlan,
        pair: HuggingFacePair,
        meter: Meter,
        num_ranks: int,
        timeout_s: float,
    ) -> None:
        """Starts or joins the ranks and loads a share of the draft on each.

        Args:
            timeout_s: the run fails when a forward pass takes longer.

        Raises:
            RankFailure: a rank ends while it loads.
            UserError: a rank refuses the configuration, or there are too few ranks.
        """
        self.step = 0
        self._timeout_s = timeout_s
        self._handle = GroupHandle(num_ranks, threads=plan.threads)
        self._group = self._handle.group
        try:
            self._session = self._group.announce(plan)
            timeout = timedelta(seconds=timeout_s)
            shared = self._group.connections.join(plan.peers, torch.device(pair.device), timeout)
            runner = pair.runner("draft", meter, shared)
            self._group.await_ready(self._session, plan.members)
        except BaseException:
            self._handle.release(broken=True)
            raise
        self._members = plan.members
        self.runner = cast("ModelRunner", _RecordingRunner(runner, self))

    def send_calls(self, calls: Calls) -> None:
        self._group.send(Message(Kind.DRAFT, self._session, self.step, calls), self._members)

    def reports(self) -> list[dict[str, Any]]:
        """Returns clock report, rows computed, bytes sent and CPU seconds of each other rank."""
        return self._group.reports(self._session, self._members)

    def failed(self, lost: PeerLost, waited_s: float) -> BaseException:
        """Returns the cause of a forward pass that failed after ``waited_s`` seconds."""
        if waited_s >= self._timeout_s:
            return self._group.hung(self._timeout_s)
        return self._group.failed(lost)

    def shutdown(self, *, broken: bool = False) -> None:
        if self._group.alive and not broken:
            self._group.close_session(self._session)
        self._handle.release(broken=broken)


class _RecordingRunner:
    """Wraps rank 0's share of the draft and records calls on its caches for the other ranks."""

    def __init__(self, inner: ModelRunner, group: DraftGroup) -> None:
        self._inner = inner
        self._group = group
        self._calls = CallList()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def new_cache(self, capacity: int) -> TreeCache:
        """Creates the cache on every rank."""
        inner = self._inner.new_cache(capacity)
        number = self._calls.make(capacity)
        cache = _RecordingCache(inner, number, self._calls)
        weakref.finalize(cache, self._calls.drop, number)
        return cast("TreeCache", cache)

    def forward(self, rows: Sequence[Rows], *, logits_rows: IntArray | None = None) -> RunnerOutput:
        """Runs one forward pass on all ranks."""
        self._group.send_calls(self._calls.take(rows, logits_rows))
        start = time.monotonic()
        try:
            return self._inner.forward(rows, logits_rows=logits_rows)
        except PeerLost as lost:
            raise self._group.failed(lost, time.monotonic() - start) from None


class _RecordingCache:
    """Wraps a cache and records its changes in a ``CallList``."""

    def __init__(self, inner: TreeCache, number: int, calls: CallList) -> None:
        self._inner = inner
        self._number = number
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def rows(self, *, prefix_tokens: IntArray = EMPTY, tree: TreeRows | None = None) -> Rows:
        rows = self._inner.rows(prefix_tokens=prefix_tokens, tree=tree)
        self._calls.rows(self._number, rows, prefix_tokens, tree)
        return rows

    def commit(self, commit: Commit) -> None:
        self._inner.commit(commit)
        self._calls.add("commit", self._number, replace(commit, hidden={}))

    def truncate(self, length: int) -> None:
        self._inner.truncate(length)
        self._calls.add("truncate", self._number, length)
