from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from specdec.types import Batch


def total(values: Sequence[Any]) -> Any:
    """Adds numbers, mappings key by key, or lists end to end; None if any of them is None."""
    if any(value is None for value in values):
        return None
    if isinstance(values[0], list):
        return [item for value in values for item in value]
    if not isinstance(values[0], dict):
        return sum(values)
    keys = dict.fromkeys(key for value in values for key in value)
    return type(values[0])({key: sum(value.get(key, 0) for value in values) for key in keys})


def difference(count: Any, before: Any) -> Any:
    """Subtracts cumulative counts, in mappings key by key; None where either is unknown."""
    if count is None or before is None:
        return None
    if isinstance(count, dict):
        return {key: difference(number, before.get(key, 0)) for key, number in count.items()}
    return count - before


@dataclass(slots=True, kw_only=True)
class SourceCounters:
    """Raw counts of a source's model work; ``RunTotals`` has them with the prefix "draft"."""

    passes: int = 0  # forward passes of all its models
    rows: int = 0  # token rows computed in them, catch-up included
    catch_up_rows: int = 0  # of committed tokens that were missing in the cache
    by_level: dict[str, int] = field(default_factory=dict)  # passes per level, outermost first


@dataclass(slots=True, kw_only=True)
class ExecutorCounters:
    passes: int = 0  # batches with tree nodes
    prefill_passes: int = 0  # batches with prompt rows only
    rows: int = 0  # tree nodes
    prefill_rows: int = 0  # prompt rows

    def count(self, batch: Batch) -> None:
        nodes, tokens = batch.num_nodes, batch.num_tokens
        self.passes += nodes > 0
        self.prefill_passes += nodes == 0 < tokens
        self.rows += nodes
        self.prefill_rows += tokens - nodes


@dataclass(slots=True, kw_only=True)
class RequestCounters:
    """Raw counts of one request.

    The target *answers* a tree, or one level of it, per step; the verifier then decides tokens.
    ``fill_steps``, ``flush_steps`` and ``refill_steps`` are steps without an answer, because the
    first root, a new root after a miss, or a kept root was on its way through the executor.
    """

    answers: int = 0
    accepted: int = 0  # draft tokens on answered paths
    hits: int = 0  # answers whose next token was in the tree
    misses: int = 0  # answers whose next token was not in the tree
    verified: int = 0  # candidates judged by the target
    proposed: int = 0  # draft nodes submitted to the target, without roots
    cut_tokens: int = 0  # decided, but not emitted because the request was complete
    fill_steps: int = 0
    flush_steps: int = 0
    refill_steps: int = 0
    accepted_by_depth: Counter[int] = field(default_factory=Counter)  # by depth below the root
    judged_by_depth: Counter[int] = field(default_factory=Counter)  # likewise
    path_lengths: Counter[int] = field(default_factory=Counter)  # tokens decided -> answers
    decided: list[int] = field(default_factory=list)  # the same lengths, one per answer, in order

    @staticmethod
    def sum(parts: Sequence[RequestCounters]) -> RequestCounters:
        names = [f.name for f in fields(RequestCounters)] if parts else []
        return RequestCounters(**{n: total([getattr(p, n) for p in parts]) for n in names})

    def count_answer(self, depth: int, num_verified: int, *, hit: bool) -> None:
        """Counts an answer with ``depth`` accepted and ``num_verified`` judged candidates."""
        self.answers += 1
        self.accepted += depth
        self.hits += hit
        self.misses += not hit
        self.verified += num_verified
        self.path_lengths[depth + 1] += 1
        self.decided.append(depth + 1)
        for level in range(1, depth + 1):  # Counter.update costs ten times as much
            self.accepted_by_depth[level] += 1
            self.judged_by_depth[level] += 1
        if num_verified > depth:
            self.judged_by_depth[depth + 1] += 1
