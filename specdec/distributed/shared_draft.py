"""A draft model that rank 0 shares with other ranks by tensor parallelism.

Rank 0 records every call on a cache of the draft and sends the recorded calls with each forward
pass. The other ranks repeat them on caches of their own attention heads, and join the pass.
"""

import itertools
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple, cast

import torch

from specdec.attention.tree_attention import EMPTY, Rows, TreeCache
from specdec.clocks import Work
from specdec.clocks.meter import Meter
from specdec.distributed.messages import Kind, Message
from specdec.distributed.plan import DraftPlan
from specdec.distributed.rank_groups import GroupHandle
from specdec.distributed.stage_worker import RankSession
from specdec.distributed.transport import PeerLost
from specdec.models.runner import ModelRunner, RunnerOutput
from specdec.pairs import HuggingFacePair, ModelPair
from specdec.tensor_parallel.collective import Collective
from specdec.types import Commit, IntArray, TreeRows


class Call(NamedTuple):
    """A recorded call on cache number ``cache``. ``name`` is a method of ``TreeCache`` (``rows``,
    ``commit``, ``truncate``), "make" (creates a cache of a given capacity) or "drop" (deletes it).
    """

    name: str
    cache: int
    arguments: tuple[Any, ...] = ()


class Calls(NamedTuple):
    """The calls that rank 0 has recorded since the last forward pass, and the rows of the pass that
    follows them.
    """

    calls: list[Call]
    rows: list[int]  # the pass's rows, as numbers of the calls of ``rows`` since the last pass
    logits_rows: IntArray | None  # indices of rows that need logits; None: all


class DraftSession(RankSession):
    """One rank's share of the draft model, with the caches of the rank's attention heads."""

    def __init__(
        self,
        *,
        rank: int,
        plan: DraftPlan,
        pair: ModelPair,
        join: Callable[[Sequence[int]], Collective],
    ) -> None:
        assert isinstance(pair, HuggingFacePair), "only pairs with a draft model share it"
        super().__init__(rank, plan)
        self._runner = pair.runner("draft", self._meter, join(plan.peers))
        self._caches: dict[int, TreeCache] = {}

    def handle(self, kind: Kind, tick: int, body: Calls) -> None:
        """Repeats the calls, then runs the forward pass; ``tick`` is the decode loop's step."""
        self._set_step(tick)
        rows: list[Rows] = []
        for name, number, arguments in body.calls:
            if name == "make":
                self._caches[number] = self._runner.new_cache(*arguments)
            elif name == "drop":
                del self._caches[number]
            elif name == "rows":
                prefix, tree = arguments
                rows.append(self._caches[number].rows(prefix_tokens=prefix, tree=tree))
            elif name == "commit":
                self._caches[number].commit(*arguments)
            else:
                self._caches[number].truncate(*arguments)
        inputs = [rows[number] for number in body.rows]
        num_rows = sum(map(len, inputs))
        self.doing = f"computing {num_rows} rows of the draft"
        self._clock.start(self._rank)
        self._runner.forward(inputs, logits_rows=body.logits_rows)
        self._clock.charge(self._rank, Work.DRAFT, num_rows)
        self.rows += num_rows
        self.doing = "waiting for rank 0"


class DraftGroup:
    """Ranks that share the draft model; rank 0 sends the other ranks every call to repeat.

    ``runner`` is rank 0's share, with the interface of a whole draft's ``ModelRunner``; ``step`` is
    the decode loop's step, for the traces of the other ranks.
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
        """Starts ``num_ranks`` ranks, or joins running ones, and loads a share of the draft on each
        of ``plan.peers``. A pass of more than ``timeout_s`` seconds is a failure.
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
        self.runner = cast("ModelRunner", RecordingRunner(runner, self))

    def send(self, calls: Calls) -> None:
        self._group.send(Message(Kind.DRAFT, self._session, self.step, calls), self._members)

    def reports(self) -> list[dict[str, Any]]:
        return self._group.reports(self._session, self._members, self._timeout_s)

    def failed(self, lost: PeerLost, waited_s: float) -> BaseException:
        if waited_s >= self._timeout_s:
            return self._group.hung(self._timeout_s)
        return self._group.failed(lost)

    def shutdown(self, *, broken: bool = False) -> None:
        if self._group.alive and not broken:
            self._group.close_session(self._session)
        self._handle.release(broken=broken)


class RecordingRunner:
    """Rank 0's share of the draft, which records the calls on its caches for the other ranks."""

    def __init__(self, inner: ModelRunner, group: DraftGroup) -> None:
        self._inner = inner
        self._group = group
        self._numbers = itertools.count()
        self._calls: list[Call] = []
        self._rows: list[Rows] = []
        self._dropped: list[int] = []  # separate: a finalizer may run during another call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def add(self, name: str, cache: int, *arguments: Any) -> None:
        self._calls.append(Call(name, cache, arguments))

    def add_rows(self, cache: int, rows: Rows, prefix: IntArray, tree: TreeRows | None) -> None:
        self._rows.append(rows)
        self.add("rows", cache, prefix, tree)

    def new_cache(self, capacity: int) -> TreeCache:
        number = next(self._numbers)
        self.add("make", number, capacity)
        cache = _RecordingCache(self._inner.new_cache(capacity), number, self)
        weakref.finalize(cache, self._dropped.append, number)
        return cast("TreeCache", cache)

    def forward(self, rows: Sequence[Rows], *, logits_rows: IntArray | None = None) -> RunnerOutput:
        numbers = {id(known): number for number, known in enumerate(self._rows)}
        while self._dropped:
            self.add("drop", self._dropped.pop())
        self._group.send(Calls(self._calls, [numbers[id(part)] for part in rows], logits_rows))
        self._calls, self._rows = [], []
        start = time.monotonic()
        try:
            return self._inner.forward(rows, logits_rows=logits_rows)
        except PeerLost as lost:
            raise self._group.failed(lost, time.monotonic() - start) from None


class _RecordingCache:
    def __init__(self, inner: TreeCache, number: int, runner: RecordingRunner) -> None:
        self._inner = inner
        self._number = number
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def rows(self, *, prefix_tokens: IntArray = EMPTY, tree: TreeRows | None = None) -> Rows:
        rows = self._inner.rows(prefix_tokens=prefix_tokens, tree=tree)
        self._runner.add_rows(self._number, rows, prefix_tokens, tree)
        return rows

    def commit(self, commit: Commit) -> None:
        self._inner.commit(commit)
        self._runner.add("commit", self._number, replace(commit, hidden={}))

    def truncate(self, length: int) -> None:
        self._inner.truncate(length)
        self._runner.add("truncate", self._number, length)
