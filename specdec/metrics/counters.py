"""Raw counts of sources, executors and requests."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from specdec.types import Batch


@dataclass(slots=True, kw_only=True)
class SourceCounters:
    """Raw counts of a source's model work.

    Attributes:
        passes: forward passes of the source's model(s).
        rows: rows computed in them, catch-up included.
        catch_up_rows: rows for committed tokens missing in the cache.
        by_level: passes per stage of a staged source, the outermost model first.
    """

    passes: int = 0
    rows: int = 0
    catch_up_rows: int = 0
    by_level: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class ExecutorCounters:
    """Raw counts of an executor's target work.

    Attributes:
        passes: batches with tree nodes that entered the target.
        prefill_passes: batches with prompt rows only.
        rows: tree nodes among them.
        prefill_rows: prompt rows.
    """

    passes: int = 0
    prefill_passes: int = 0
    rows: int = 0
    prefill_rows: int = 0

    def count(self, batch: Batch) -> None:
        """Counts a batch that is submitted to the target."""
        nodes, tokens = batch.num_nodes, batch.num_tokens
        self.passes += nodes > 0
        self.prefill_passes += nodes == 0 < tokens
        self.rows += nodes
        self.prefill_rows += tokens - nodes


@dataclass(slots=True, kw_only=True)
class RequestCounters:
    """Raw counts of one request.

    Attributes:
        answers: verdicts, one per step that answered this request.
        accepted: accepted draft tokens on answered paths.
        hits, misses: answers whose next token was in the tree, and was not.
        verified: candidates judged by the target.
        proposed: draft nodes submitted to the target (roots not counted).
        cut_tokens: decided tokens that were not emitted since the request was complete.
        fill_steps, flush_steps, refill_steps: steps without an answer while the first root, a new
            root after a miss, or a kept root passed through the executor.
        accepted_by_depth, judged_by_depth: depth below the answered root -> count.
        path_lengths: emitted tokens per answer -> count.
        decided: the same lengths, one per answer, in order.
    """

    answers: int = 0
    accepted: int = 0
    hits: int = 0
    misses: int = 0
    verified: int = 0
    proposed: int = 0
    cut_tokens: int = 0
    fill_steps: int = 0
    flush_steps: int = 0
    refill_steps: int = 0
    accepted_by_depth: Counter[int] = field(default_factory=Counter)
    judged_by_depth: Counter[int] = field(default_factory=Counter)
    path_lengths: Counter[int] = field(default_factory=Counter)
    decided: list[int] = field(default_factory=list)

    def count_answer(self, depth: int, num_verified: int, *, hit: bool) -> None:
        """Counts an answer.

        Args:
            depth: accepted draft tokens on its path.
            num_verified: candidates that the target judged.
            hit: whether its next token was in the tree.
        """
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
