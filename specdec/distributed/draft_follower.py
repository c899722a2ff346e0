"""Ranks that share the draft with rank 0: they replay its calls on the draft's caches.

Rank 0 records every call on a cache of the draft and sends the list with each forward pass. The
other ranks thus cache the same entries (for their own heads) and join the pass's collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

from specdec.attention.kv_cache import Rows, TreeCache
from specdec.clocks import Timeline, WallClock, Work
from specdec.clocks.build import build_clock
from specdec.clocks.meter import Meter
from specdec.distributed.plan import DraftPlan
from specdec.tensor_parallel.collective import Collective
from specdec.types import IntArray, TreeRows

if TYPE_CHECKING:
    from specdec.pairs import ModelPair


class Call(NamedTuple):
    """A method of ``TreeCache`` (``rows``, ``commit``, ``truncate``) called on a cache.

    Other names are ``make`` (a new cache of a given capacity) and ``drop``.
    """

    name: str
    cache: int
    arguments: tuple[Any, ...] = ()


class Calls(NamedTuple):
    """Calls since the last forward pass, and the pass that follows them.

    Attributes:
        rows: the pass's rows, as numbers of the calls of ``rows`` since the last pass.
        logits_rows: indices of rows that need logits; None: all.
    """

    calls: list[Call]
    rows: list[int]
    logits_rows: IntArray | None


class CallList:
    """Records calls since the last forward pass."""

    def __init__(self) -> None:
        self._calls: list[Call] = []
        self._rows: list[Rows] = []
        self._dropped: list[int] = []  # separate: a finalizer may run during another call
        self._num_caches = 0

    def make(self, capacity: int) -> int:
        """Records a new cache and returns its number."""
        number = self._num_caches
        self._num_caches += 1
        self.add("make", number, capacity)
        return number

    def rows(self, cache: int, rows: Rows, prefix: IntArray, tree: TreeRows | None) -> None:
        """Records ``TreeCache.rows``: its result and its arguments."""
        self._rows.append(rows)
        self.add("rows", cache, prefix, tree)

    def add(self, name: str, cache: int, *arguments: Any) -> None:
        self._calls.append(Call(name, cache, arguments))

    def drop(self, cache: int) -> None:
        self._dropped.append(cache)

    def take(self, rows: Sequence[Rows], logits_rows: IntArray | None) -> Calls:
        """Returns the recorded calls, followed by a pass over ``rows``, and starts a new list."""
        numbers = {id(known): number for number, known in enumerate(self._rows)}
        while self._dropped:
            self.add("drop", self._dropped.pop())
        taken = Calls(self._calls, [numbers[id(part)] for part in rows], logits_rows)
        self._calls, self._rows = [], []
        return taken


class DraftSession:
    """One rank's share of the draft model, with the caches of its heads.

    Attributes:
        rows: number of rows computed so far.
        doing: current operation, as text for the diagnosis of hangs.
    """

    def __init__(
        self,
        *,
        rank: int,
        plan: DraftPlan,
        pair: ModelPair,
        join: Callable[[Sequence[int]], Collective],
    ) -> None:
        """Loads this rank's share of the draft; ``join`` connects the given ranks."""
        from specdec.pairs import HuggingFacePair

        assert isinstance(pair, HuggingFacePair), "only pairs with a draft model share it"
        meter = Meter()
        self._timeline = Timeline() if plan.trace else None
        clock = build_clock(plan.clock, meter, rank=rank, timeline=self._timeline)
        assert isinstance(clock, WallClock), "other clocks start no ranks"
        self._rank = rank
        self._clock = clock
        self._runner = pair.runner("draft", meter, join(plan.peers))
        self._caches: dict[int, TreeCache] = {}
        self.rows = 0
        self.doing = "waiting for rank 0"

    def replay(self, step: int, calls: Calls) -> None:
        """Replays recorded calls; ``step`` is the iteration of the decode loop, for the trace."""
        if self._timeline is not None:
            self._timeline.step = step
        rows: list[Rows] = []
        for name, number, arguments in calls.calls:
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
        self._pass([rows[number] for number in calls.rows], calls.logits_rows)

    def report(self) -> dict[str, object]:
        return {"clock": asdict(self._clock.report()), "rows": self.rows}

    def _pass(self, inputs: Sequence[Rows], logits_rows: IntArray | None) -> None:
        num_rows = sum(map(len, inputs))
        self.doing = f"computing {num_rows} rows of the draft"
        self._clock.start(self._rank)
        self._runner.forward(inputs, logits_rows=logits_rows)
        self._clock.charge(self._rank, Work.DRAFT, num_rows)
        self.rows += num_rows
        self.doing = "waiting for rank 0"
