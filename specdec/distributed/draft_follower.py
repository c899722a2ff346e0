"""Ranks that share the draft with rank 0: they replay its calls on the draft's caches.

Rank 0 records every call on a cache of the draft and sends the list with each forward pass. The
other ranks thus cache the same entries (for their own heads) and join the pass's collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from specdec.attention.kv_cache import Rows, TreeCache
from specdec.clocks import Timeline, WallClock, Work
from specdec.clocks.build import build_clock
from specdec.clocks.meter import Meter
from specdec.distributed.messages import Reader, pack_commit, pack_tree
from specdec.distributed.plan import DraftPlan
from specdec.tensor_parallel.collective import Collective
from specdec.types import Commit, IntArray, TreeRows

if TYPE_CHECKING:
    from specdec.pairs import ModelPair


class Call(IntEnum):
    """Recorded calls. Each starts with this number and, except ``PASS``, a cache number.

    - ``MAKE``: creates a cache of a given capacity.
    - ``ROWS``, ``COMMIT``, ``TRUNCATE``: methods of ``TreeCache``. Rows are numbered from 0 after
      each pass.
    - ``DROP``: deletes a cache.
    - ``PASS``: a forward pass: numbers of its rows, and indices of rows that need logits (-1: all).
    """

    MAKE = 0
    ROWS = 1
    COMMIT = 2
    TRUNCATE = 3
    DROP = 4
    PASS = 5


class CallList:
    """Records calls since the last forward pass, packed for sending."""

    def __init__(self) -> None:
        self.parts: list[IntArray] = []
        self._rows: list[Rows] = []
        self._dropped: list[int] = []  # separate: a finalizer may run during another call
        self._num_caches = 0

    def make(self, capacity: int) -> int:
        """Records a new cache and returns its number."""
        number = self._num_caches
        self._num_caches += 1
        self.add(Call.MAKE, number, capacity)
        return number

    def rows(self, cache: int, rows: Rows, prefix: IntArray, tree: TreeRows | None) -> None:
        """Records ``TreeCache.rows``: its result and its arguments."""
        self._rows.append(rows)
        self.add(Call.ROWS, cache, len(prefix))
        self.parts.append(prefix)
        self.add(tree is not None)
        if tree is not None:
            self.parts += pack_tree(tree)

    def commit(self, cache: int, commit: Commit) -> None:
        self.add(Call.COMMIT, cache)
        self.parts += pack_commit(commit)

    def drop(self, cache: int) -> None:
        self._dropped.append(cache)

    def add(self, *values: int) -> None:
        self.parts.append(np.array(values, np.int64))

    def take(self, rows: Sequence[Rows], logits_rows: IntArray | None) -> list[IntArray]:
        """Returns the recorded calls, followed by a pass over ``rows``, and starts a new list."""
        numbers = {id(known): number for number, known in enumerate(self._rows)}
        while self._dropped:
            self.add(Call.DROP, self._dropped.pop())
        self.add(Call.PASS, len(rows), *(numbers[id(part)] for part in rows))
        self.add(-1 if logits_rows is None else len(logits_rows))
        if logits_rows is not None:
            self.parts.append(logits_rows)
        parts, self.parts, self._rows = self.parts, [], []
        return parts


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

    def replay(self, step: int, packed: IntArray) -> None:
        """Replays packed calls; ``step`` is the iteration of the decode loop, for the trace."""
        if self._timeline is not None:
            self._timeline.step = step
        reader, rows = Reader(packed), list[Rows]()
        while not reader.at_end:
            call = reader.ints(1)[0]
            if call == Call.PASS:
                self._pass(reader, rows)
            else:
                self._cache_call(call, reader, rows)

    def report(self) -> dict[str, object]:
        return {"clock": asdict(self._clock.report()), "rows": self.rows}

    def _cache_call(self, call: int, reader: Reader, rows: list[Rows]) -> None:
        number = reader.ints(1)[0]
        if call == Call.MAKE:
            self._caches[number] = self._runner.new_cache(reader.ints(1)[0])
            return
        if call == Call.DROP:
            del self._caches[number]
            return
        cache = self._caches[number]
        if call == Call.ROWS:
            prefix, has_tree = reader.array(), reader.ints(1)[0]
            tree = reader.tree() if has_tree else None
            rows.append(cache.rows(prefix_tokens=prefix, tree=tree))
        elif call == Call.COMMIT:
            cache.commit(reader.commit())
        else:
            cache.truncate(reader.ints(1)[0])

    def _pass(self, reader: Reader, rows: list[Rows]) -> None:
        numbers = reader.ints(reader.ints(1)[0])
        num_logits = reader.ints(1)[0]
        logits_rows = None if num_logits < 0 else reader.raw(num_logits)
        inputs = [rows[number] for number in numbers]
        num_rows = sum(map(len, inputs))
        self.doing = f"computing {num_rows} rows of the draft"
        self._clock.start(self._rank)
        self._runner.forward(inputs, logits_rows=logits_rows)
        self._clock.charge(self._rank, Work.DRAFT, num_rows)
        self.rows += num_rows
        self.doing = "waiting for rank 0"
