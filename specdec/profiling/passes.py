"""Measures the times of a stage, the output head, a draft pass and pruning.

Every repeat covers all numbers of tokens, so that a drift of the machine affects them equally.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from specdec.attention.kv_cache import TreeCache
from specdec.clocks import Work
from specdec.clocks.meter import Meter
from specdec.executors.stage import InFlight, split_layers
from specdec.models.runner import NO_ROWS, ModelRunner
from specdec.pairs import HuggingFacePair
from specdec.types import NO_NODE, Batch, Commit, CommitKind, IntArray, TreeRows

_CANDIDATES = 16  # per row of a draft pass (SpecPipe, PipeDec: 16 children)
_PREFILL_ROWS = 256


def measure_model(
    pair: HuggingFacePair,
    *,
    stages: int,
    tokens: Sequence[int],
    repeats: int,
    context: int,
    requests: int = 1,
    on_repeat: Callable[[str], None] = lambda _: None,
) -> dict[Work, list[Sample]]:
    """Measures the passes of target and draft.

    Args:
        stages: number of pipeline stages; the longest slice of the target is measured.
        tokens: numbers of rows per pass, increasing.
        context: committed tokens before the tree.
        requests: number of requests that share a pass, each with its own cache. A pass of fewer
            rows has one row per request.

    Returns:
        Samples of stage, head, draft and prune. The time of the head is that of the last slice
        with the logits of all rows minus that of a pass without logits directly before.
    """
    meter = Meter()
    bounds = split_layers(pair.num_layers, stages)
    longest = max(bounds, key=lambda bound: bound[1] - bound[0])
    stage, last = (
        _Bench(pair.stage(*bound, meter).runner, context, max(tokens), requests)
        for bound in (longest, bounds[-1])
    )
    draft = _Bench(pair.runner("draft", meter), context, max(tokens), requests)
    kinds = {
        Work.STAGE: stage.layers,
        Work.PRUNE: stage.prune,
        Work.HEAD: last.head,
        Work.DRAFT: draft.proposals,
    }
    samples = {}
    for kind, seconds_of in kinds.items():
        ms: dict[int, list[float]] = {num: [] for num in tokens}
        for i in range(repeats + 1):
            for num in tokens:
                seconds = seconds_of(num)
                if i:  # the first round is not counted: it allocates and pages in
                    ms[num].append(seconds * 1e3)
            on_repeat(kind.value)
        samples[kind] = [Sample(num, tuple(ms[num])) for num in tokens]
    return samples


class _Bench:
    """A slice of a model with one filled cache per request.

    The methods return seconds; ``num`` is the number of rows over all requests.
    """

    def __init__(
        self, runner: ModelRunner, context: int, max_tokens: int, requests: int = 1
    ) -> None:
        self._runner = runner
        self._context = context
        self._caches: list[TreeCache] = [
            runner.new_cache(context + max_tokens) for _ in range(requests)
        ]
        self._cache = self._caches[0]
        self._step = 0
        for cache in self._caches:
            for start in range(0, context, _PREFILL_ROWS):
                tokens = np.arange(start, min(start + _PREFILL_ROWS, context))
                rows = cache.rows(prefix_tokens=tokens % runner.vocab_size)
                runner.forward([rows], hidden=self._hidden(len(tokens)), logits_rows=NO_ROWS)

    def layers(self, num: int) -> float:
        """Times the layers without logits, with rows packed and masked as in a run."""
        return self._seconds(lambda: self._pass(num, NO_ROWS))

    def head(self, num: int) -> float:
        """Times the logits of all rows, a difference of two passes: noise may make it negative."""
        bare = self.layers(num)
        return self._seconds(lambda: self._pass(num, None)) - bare

    def proposals(self, num: int) -> float:
        """Times a draft pass and the selection of its candidates."""

        def propose() -> None:
            logits = self._pass(num, None)
            assert logits is not None
            probs = torch.log_softmax(logits.float(), dim=-1)
            probs.topk(min(_CANDIDATES, probs.shape[-1])).values.cpu()

        return self._seconds(propose)

    def prune(self, num: int) -> float:
        """Times pruning the cache and the rows in flight to half of ``num`` nodes."""
        rows = _level(num, self._context)
        self._forward([(self._cache, num)], NO_ROWS)
        self._step += 1
        kept = np.arange(min(1, num - 1), num, 2)
        commit = Commit(
            request=0,
            step=self._step,
            kind=CommitKind.HIT,
            retired_ids=np.array([0]),
            retired_tokens=np.array([0]),
            next_token=0,
            root_id=int(kept[0]),
            prefix_len=self._context + 1,
            kept_ids=kept,
        )
        flight = InFlight(Batch(step=0, trees=(rows,)), self._rows_of_ones(num))

        def prune() -> None:
            self._cache.commit(commit)
            flight.prune({0: commit})

        return self._seconds(prune)

    def _seconds(self, work: Callable[[], Any]) -> float:
        self._wait()
        start = perf_counter()
        work()
        self._wait()
        seconds = perf_counter() - start
        for cache in self._caches:
            cache.truncate(self._context)
        return seconds

    def _pass(self, num: int, logits_rows: IntArray | None) -> torch.Tensor | None:
        used = self._caches[:num]
        each, more = divmod(num, len(used))
        shares = [(cache, each + (at < more)) for at, cache in enumerate(used)]
        return self._forward(shares, logits_rows)

    def _forward(
        self, shares: Sequence[tuple[TreeCache, int]], logits_rows: IntArray | None
    ) -> torch.Tensor | None:
        """Runs one pass over the given number of rows of each cache, and returns its logits."""
        packed = []
        for cache, num in shares:
            packed.append(cache.rows(tree=_level(num, self._context)))
        hidden = self._hidden(sum(num for _, num in shares))
        return self._runner.forward(packed, hidden=hidden, logits_rows=logits_rows).logits

    def _hidden(self, num: int) -> torch.Tensor | None:
        return None if self._runner.is_first else self._rows_of_ones(num)

    def _rows_of_ones(self, num: int) -> torch.Tensor:
        runner = self._runner
        return torch.ones(num, runner.hidden_size, dtype=runner.dtype, device=runner.device)

    def _wait(self) -> None:
        if self._runner.device.type == "cuda":
            torch.cuda.synchronize(self._runner.device)


def _level(num: int, context: int) -> TreeRows:
    """Returns a root and ``num`` - 1 children."""
    ids, tokens = np.arange(num), np.zeros(num, np.int64)
    parents = np.where(ids, 0, NO_NODE)
    return TreeRows.within(prefix_len=context, node_ids=ids, tokens=tokens, parent_ids=parents)


@dataclass(frozen=True, slots=True)
class Sample:
    """Repeated measurements of one kind of work on ``tokens`` rows.

    ``ms`` has the milliseconds of each repeat; the head's are differences and may be negative.
    """

    tokens: int
    ms: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        """The time in a profile: the median, or 0 if that is negative."""
        return max(0.0, median(self.ms))

    @property
    def spread(self) -> float:
        """Half of the range over the median; 0 if the median is 0."""
        return (max(self.ms) - min(self.ms)) / 2 / self.median_ms if self.median_ms else 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "median_ms": self.median_ms,
            "spread": self.spread,
            "ms": list(self.ms),
        }
