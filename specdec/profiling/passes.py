"""Times of a model's own work: a stage, the output head, a draft pass, pruning.

Every repeat goes through all numbers of tokens, so that a machine's drift falls on all alike; the
median is what counts. W is the number of tree rows of a pass, one level under a root.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import numpy as np
import torch

from specdec.attention.kv_cache import TreeCache
from specdec.clocks import Work
from specdec.clocks.meter import Meter
from specdec.executors.row_packing import InFlight
from specdec.executors.stage import ModelStage, split_layers
from specdec.models import NO_ROWS, ModelRunner
from specdec.pairs import HuggingFacePair
from specdec.types import NO_NODE, Batch, Commit, CommitKind, IntArray, TreeRows

_CANDIDATES = 16  # that a draft pass takes from each row (SpecPipe, PipeDec: 16 children)
_PREFILL_ROWS = 256


def measure_model(
    pair: HuggingFacePair,
    *,
    stages: int,
    tokens: Sequence[int],
    repeats: int,
    context: int,
    on_repeat: Callable[[str], None] = lambda _: None,
) -> dict[Work, list[Sample]]:
    """Measures target and draft.

    Args:
        pair: real models.
        stages: the target is cut into so many; the longest slice is what a stage costs.
        tokens: numbers of rows per pass, increasing.
        repeats: of everything, after one uncounted round.
        context: committed tokens before the tree.
        on_repeat: told of each repeat's kind of work.

    Returns:
        Samples of stage, head, draft and prune. The head is what the last slice takes more when it
        hands out the logits of all its rows, one pass right after the other.
    """
    meter = Meter()
    bounds = split_layers(pair.num_layers, stages)
    longest = max(bounds, key=lambda bound: bound[1] - bound[0])
    found: dict[Work, list[Sample]] = {}
    stage = _Bench(_runner(pair, longest, meter), context, max(tokens))
    found[Work.STAGE] = stage.repeat(stage.layers, tokens, repeats, lambda: on_repeat("stage"))
    found[Work.PRUNE] = stage.repeat(stage.prune, tokens, repeats, lambda: on_repeat("prune"))
    last = _Bench(_runner(pair, bounds[-1], meter), context, max(tokens))
    found[Work.HEAD] = last.repeat(last.head, tokens, repeats, lambda: on_repeat("head"))
    draft = _Bench(pair.draft_runner(meter), context, max(tokens))
    found[Work.DRAFT] = draft.repeat(draft.proposals, tokens, repeats, lambda: on_repeat("draft"))
    return found


def _runner(pair: HuggingFacePair, bounds: tuple[int, int], meter: Meter) -> ModelRunner:
    stage = pair.stage(*bounds, meter)
    assert isinstance(stage, ModelStage), "a pair of real models has real stages"
    return stage.runner


class _Bench:
    """One slice of a model with a filled cache."""

    def __init__(self, runner: ModelRunner, context: int, max_tokens: int) -> None:
        self._runner = runner
        self._context = context
        self._cache: TreeCache = runner.new_cache(context + max_tokens)
        self._step = 0
        self._fill()

    def repeat(
        self,
        work: Callable[[int], float],
        tokens: Sequence[int],
        repeats: int,
        on_repeat: Callable[[], None],
    ) -> list[Sample]:
        """Samples of ``work``, which takes a number of tokens and returns seconds."""
        times: dict[int, list[float]] = defaultdict(list)
        for i in range(repeats + 1):
            for num in tokens:
                seconds = work(num)
                if i:  # the first round allocates and pages in
                    times[num].append(seconds * 1e3)
            on_repeat()
        return [Sample(num, tuple(times[num])) for num in tokens]

    def layers(self, num: int) -> float:
        """Seconds of the layers alone, rows packed and masked as in a run."""
        return self._timed(num, NO_ROWS)

    def head(self, num: int) -> float:
        """Seconds that the pass takes more when it hands out all rows' logits; noise may be less
        than nothing."""
        bare = self._timed(num, NO_ROWS)
        return self._timed(num, None) - bare

    def proposals(self, num: int) -> float:
        """Seconds of a draft pass and the choice of its candidates."""
        return self._timed(num, None, candidates=_CANDIDATES)

    def prune(self, num: int) -> float:
        """Seconds of following a hit that keeps half of ``num`` nodes: cache and rows in flight."""
        rows = _level(num, self._context)
        self._pass(num, NO_ROWS)
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
        hidden = torch.zeros(
            num, self._runner.hidden_size, dtype=self._runner.dtype, device=self._runner.device
        )
        flight = InFlight(Batch(step=0, trees=(rows,)), hidden)
        self._wait()
        start = perf_counter()
        self._cache.commit(commit)
        flight.prune({0: commit})
        self._wait()
        seconds = perf_counter() - start
        self._cache.truncate(self._context)
        return seconds

    def _timed(self, num: int, logits_rows: IntArray | None, candidates: int = 0) -> float:
        self._wait()
        start = perf_counter()
        logits = self._pass(num, logits_rows)
        if candidates and logits is not None:
            probs = torch.log_softmax(logits.float(), dim=-1)
            probs.topk(min(candidates, probs.shape[-1])).values.cpu()
        self._wait()
        seconds = perf_counter() - start
        self._cache.truncate(self._context)
        return seconds

    def _pass(self, num: int, logits_rows: IntArray | None) -> torch.Tensor | None:
        level = _level(num, self._context)
        rows = self._cache.rows(
            node_ids=level.node_ids,
            node_tokens=level.tokens,
            parent_ids=level.parent_ids,
            node_positions=level.positions,
        )
        return self._runner.forward(
            [rows], hidden=self._hidden(num), logits_rows=logits_rows
        ).logits

    def _fill(self) -> None:
        """Commits ``context`` tokens, in chunks."""
        for start in range(0, self._context, _PREFILL_ROWS):
            tokens = np.arange(start, min(start + _PREFILL_ROWS, self._context))
            rows = self._cache.rows(prefix_tokens=tokens % self._runner.vocab_size)
            hidden = self._hidden(len(tokens))
            self._runner.forward([rows], hidden=hidden, logits_rows=NO_ROWS)

    def _hidden(self, num: int) -> torch.Tensor | None:
        if self._runner.is_first:
            return None
        shape = (num, self._runner.hidden_size)
        return torch.ones(shape, dtype=self._runner.dtype, device=self._runner.device)

    def _wait(self) -> None:
        if self._runner.device.type == "cuda":
            torch.cuda.synchronize(self._runner.device)


def _level(num: int, context: int) -> TreeRows:
    """A root and ``num`` - 1 children."""
    ids = np.arange(num)
    return TreeRows(
        request=0,
        prefix_len=context,
        node_ids=ids,
        tokens=np.zeros(num, np.int64),
        parent_ids=np.where(ids, 0, NO_NODE),
        depths=np.minimum(ids, 1),
    )


@dataclass(frozen=True, slots=True)
class Sample:
    """Repeated measurements of one piece of work.

    Attributes:
        tokens: rows that it was about.
        ms: one time per repeat, in order; of a difference, it may be below 0.
    """

    tokens: int
    ms: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        """What goes into a profile."""
        return max(0.0, median(self.ms))

    @property
    def spread(self) -> float:
        """Half of the range over the median: how far to trust it."""
        return (max(self.ms) - min(self.ms)) / 2 / self.median_ms if self.median_ms else 0.0
