"""The ranks that share the draft with rank 0: they repeat what it does to its caches.

Rank 0 writes down every call on a cache of the draft and sends the list with each pass, so the
others hold the same entries (of their own heads) and join every sum and gather of the pass.
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
from specdec.distributed.messages import Reader, commit_parts
from specdec.distributed.plan import DraftPlan
from specdec.tensor_parallel.collective import Collective
from specdec.types import Commit, IntArray

if TYPE_CHECKING:
    from specdec.pairs import ModelPair


class Call(IntEnum):
    """Calls that rank 0 writes down; each begins with its number and, but for ``PASS``, a cache's.

    ``MAKE``: a cache of some capacity. ``ROWS``, ``COMMIT``, ``TRUNCATE``: as ``TreeCache`` has
    them; rows are numbered from 0 again after each pass. ``DROP``: a cache is no more. ``PASS``:
    which rows meet in one forward, and which of them want logits (-1: all).
    """

    MAKE = 0
    ROWS = 1
    COMMIT = 2
    TRUNCATE = 3
    DROP = 4
    PASS = 5


class CallList:
    """What has happened since the last pass, ready to be sent.

    Attributes:
        parts: the words of the list so far.
    """

    def __init__(self) -> None:
        self.parts: list[IntArray] = []
        self._rows: list[Rows] = []
        self._dropped: list[int] = []  # apart: garbage may be collected in the middle of a call
        self._num_caches = 0

    def make(self, capacity: int) -> int:
        """A new cache; returns its number."""
        number = self._num_caches
        self._num_caches += 1
        self._note(Call.MAKE, number, capacity)
        return number

    def rows(self, cache: int, rows: Rows, arrays: Sequence[IntArray]) -> None:
        """What ``TreeCache.rows`` was given (in the order of its arguments) and returned."""
        self._rows.append(rows)
        self._note(Call.ROWS, cache)
        for array in arrays:
            self._note(len(array))
            self.parts.append(array)

    def commit(self, cache: int, commit: Commit) -> None:
        """A commit that a cache has followed."""
        self._note(Call.COMMIT, cache)
        self.parts += commit_parts(commit)

    def truncate(self, cache: int, length: int) -> None:
        """A cache was cut to its first tokens."""
        self._note(Call.TRUNCATE, cache, length)

    def drop(self, cache: int) -> None:
        """Nobody holds the cache any more."""
        self._dropped.append(cache)

    def take(self, rows: Sequence[Rows], logits_rows: IntArray | None) -> list[IntArray]:
        """The whole list, which ends with a pass over ``rows``; starts a new one."""
        numbers = {id(known): number for number, known in enumerate(self._rows)}
        while self._dropped:
            self._note(Call.DROP, self._dropped.pop())
        self._note(Call.PASS, len(rows), *(numbers[id(part)] for part in rows))
        self._note(-1 if logits_rows is None else len(logits_rows))
        if logits_rows is not None:
            self.parts.append(logits_rows)
        found, self.parts, self._rows = self.parts, [], []
        return found

    def _note(self, *words: int) -> None:
        self.parts.append(np.array(words, np.int64))


class DraftSession:
    """One rank's share of the draft, and its caches.

    Attributes:
        rows: rows computed so far.
        doing: what the rank is at, in words, for the diagnosis of a hang.
    """

    def __init__(
        self,
        *,
        rank: int,
        plan: DraftPlan,
        pair: ModelPair,
        join: Callable[[Sequence[int]], Collective],
    ) -> None:
        """Joins the group and loads its share.

        Args:
            rank: one of the plan's, not 0.
            plan: of all of them.
            pair: the plan's model, on this rank.
            join: connects this rank with the others.
        """
        from specdec.pairs import HuggingFacePair

        assert isinstance(pair, HuggingFacePair), "only real drafts are shared"
        meter = Meter()
        timeline = Timeline() if plan.trace else None
        clock = build_clock(plan.clock, meter, rank=rank, timeline=timeline)
        assert isinstance(clock, WallClock), "refused before ranks were started"
        self._rank = rank
        self._clock = clock
        self._runner = pair.draft_runner(meter, join(plan.peers))
        self._caches: dict[int, TreeCache] = {}
        self.rows = 0
        self.doing = "waiting for rank 0"

    def follow(self, words: IntArray) -> None:
        """Repeats a list of calls."""
        reader, rows = Reader(words), list[Rows]()
        while not reader.at_end:
            call = reader.ints(1)[0]
            if call == Call.PASS:
                self._pass(reader, rows)
            else:
                self._repeat(call, reader, rows)

    def report(self) -> dict[str, object]:
        """What the clock reports, and the rows computed; plain values."""
        return {"clock": asdict(self._clock.report()), "rows": self.rows}

    def _repeat(self, call: int, reader: Reader, rows: list[Rows]) -> None:
        number = reader.ints(1)[0]
        if call == Call.MAKE:
            self._caches[number] = self._runner.new_cache(reader.ints(1)[0])
            return
        if call == Call.DROP:
            del self._caches[number]
            return
        cache = self._caches[number]
        if call == Call.ROWS:
            prefix, ids, tokens, parents, positions = (reader.array() for _ in range(5))
            rows.append(
                cache.rows(
                    prefix_tokens=prefix,
                    node_ids=ids,
                    node_tokens=tokens,
                    parent_ids=parents,
                    node_positions=positions,
                )
            )
        elif call == Call.COMMIT:
            cache.commit(reader.commit())
        else:
            cache.truncate(reader.ints(1)[0])

    def _pass(self, reader: Reader, rows: list[Rows]) -> None:
        numbers = reader.ints(reader.ints(1)[0])
        wanted = reader.ints(1)[0]
        logits_rows = None if wanted < 0 else reader.raw(wanted)
        met = [rows[number] for number in numbers]
        num_rows = sum(map(len, met))
        self.doing = f"computing {num_rows} rows of the draft"
        self._clock.start(self._rank)
        self._runner.forward(met, logits_rows=logits_rows)
        self._clock.charge(self._rank, Work.DRAFT, num_rows)
        self.rows += num_rows
        self.doing = "waiting for rank 0"
