"""Measures the times of a stage, the output head, a draft pass, pruning and a transfer.

Each repeat measures all numbers of rows once, so a drift of the machine affects them equally.
"""

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from specdec.clocks import Work
from specdec.clocks.meter import Meter
from specdec.errors import UserError
from specdec.executors.stage import InFlight, split_layers
from specdec.models.runner import NO_ROWS, ModelRunner
from specdec.pairs import HuggingFacePair
from specdec.types import NO_NODE, Batch, Commit, CommitKind, IntArray, TreeRows

_CANDIDATES = 16  # per row of a draft pass (SpecPipe, PipeDec: 16 children)
_PREFILL_ROWS = 256
_TIMEOUT_S = 180.0  # of all transfers
_DIGITS = 4  # decimals of milliseconds in a profile: 0.1 microseconds


@dataclass(frozen=True, slots=True)
class Sample:
    """Milliseconds of a pass over ``tokens`` rows, in each repeat. Those of the output head are
    differences of two passes, which may be negative.
    """

    tokens: int
    ms: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        """The time that a latency profile gets: the median, or 0 if that is negative."""
        return max(0.0, median(self.ms))

    @property
    def spread(self) -> float:
        """Half of the range divided by the median, or 0 if the median is 0."""
        return (max(self.ms) - min(self.ms)) / 2 / self.median_ms if self.median_ms else 0.0

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "median_ms": self.median_ms, "spread": self.spread}


def costs_of(samples: Mapping[Work, Sequence[Sample]]) -> dict[str, Any]:
    costs = {}
    for kind, of_kind in samples.items():
        ms = [round(sample.median_ms, _DIGITS) for sample in of_kind]
        if any(ms):
            costs[kind.value] = {"tokens": [sample.tokens for sample in of_kind], "ms": ms}
    return costs


def measure_model(
    pair: HuggingFacePair,
    *,
    stages: int,
    tokens: Sequence[int],
    repeats: int,
    context: int,
    requests: int = 1,
    transfer: bool = False,
    on_repeat: Callable[[str], None] = lambda _: None,
) -> dict[Work, list[Sample]]:
    """Measures passes of the target and the draft, and optionally transfers of hidden states.

    Returns, per kind of work, a ``Sample`` for each number of rows in ``tokens`` (increasing). The
    longest of ``stages`` slices of the target is measured. The output head's time is that of a pass
    of the last slice with logits of all rows, minus that of one without logits. Rows follow
    ``context`` committed tokens and are spread over ``requests`` requests with a cache each.
    ``on_repeat`` is called with the kind of work after each repeat.
    """
    meter = Meter()
    bounds = split_layers(pair.num_layers, stages)
    longest = max(bounds, key=lambda bound: bound[1] - bound[0])
    stage, last, draft = (
        _TimedRunner(runner, context, max(tokens), requests)
        for runner in (
            *(pair.stage(*bound, meter).runner for bound in (longest, bounds[-1])),
            pair.runner("draft", meter),
        )
    )
    kinds = {Work.STAGE: stage.layers, Work.PRUNE: stage.prune, Work.HEAD: last.head}
    kinds[Work.DRAFT] = draft.proposals
    samples = {}
    for kind, seconds_of in kinds.items():
        rounds = []
        for _ in range(repeats + 1):
            rounds.append([1e3 * seconds_of(num) for num in tokens])
            on_repeat(kind.value)
        # The first round is not counted: it allocates and pages in.
        samples[kind] = list(map(Sample, tokens, zip(*rounds[1:], strict=True)))
    if transfer:
        on_repeat("transfers")
        width = int(pair.target.config.get_text_config().hidden_size)
        dtype = next(pair.target.parameters()).dtype
        shape: dict[str, Any] = {"tokens": tokens, "repeats": repeats}
        samples[Work.TRANSFER] = measure_transfer(width=width, dtype=dtype, **shape)
    return samples


class _TimedRunner:
    """A model slice with filled caches; methods return the seconds of a pass of ``num`` rows."""

    def __init__(self, runner: ModelRunner, context: int, max_tokens: int, requests: int) -> None:
        self._runner, self._context, self._step = runner, context, 0
        self._caches = [runner.new_cache(context + max_tokens) for _ in range(requests)]
        for cache in self._caches:
            for start in range(0, context, _PREFILL_ROWS):
                tokens = np.arange(start, min(start + _PREFILL_ROWS, context))
                rows = cache.rows(prefix_tokens=tokens % runner.vocab_size)
                runner.forward([rows], hidden=self._hidden(len(tokens)), logits_rows=NO_ROWS)

    def layers(self, num: int) -> float:
        return self._seconds(lambda: self._pass(num, NO_ROWS))

    def head(self, num: int) -> float:
        """Times the logits of all rows, as a difference of two passes that may be negative."""
        bare = self.layers(num)
        return self._seconds(lambda: self._pass(num, None)) - bare

    def proposals(self, num: int) -> float:
        def propose() -> None:
            logits = self._pass(num, None)
            assert logits is not None
            probs = torch.log_softmax(logits.float(), dim=-1)
            probs.topk(min(_CANDIDATES, probs.shape[-1])).values.cpu()

        return self._seconds(propose)

    def prune(self, num: int) -> float:
        """Times pruning the cache and the rows in flight to half of ``num`` nodes."""
        self._pass(num, NO_ROWS, 1)
        self._step += 1
        kept = np.arange(min(1, num - 1), num, 2)
        ids: dict[str, Any] = {"retired_ids": np.array([0]), "retired_tokens": np.array([0])}
        ids |= {"next_token": 0, "root_id": int(kept[0]), "prefix_len": self._context + 1}
        commit = Commit(request=0, step=self._step, kind=CommitKind.HIT, kept_ids=kept, **ids)
        flight = InFlight(Batch(step=0, trees=(_level(num, self._context),)), self._ones(num))

        def prune() -> None:
            self._caches[0].commit(commit)
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

    def _pass(
        self, num: int, logits_rows: IntArray | None, requests: int | None = None
    ) -> torch.Tensor | None:
        used = self._caches[:requests][:num]
        each, more = divmod(num, len(used))
        levels = (_level(each + (at < more), self._context) for at in range(len(used)))
        packed = [cache.rows(tree=level) for cache, level in zip(used, levels, strict=True)]
        hidden = self._hidden(num)
        return self._runner.forward(packed, hidden=hidden, logits_rows=logits_rows).logits

    def _hidden(self, num: int) -> torch.Tensor | None:
        return None if self._runner.is_first else self._ones(num)

    def _ones(self, num: int) -> torch.Tensor:
        runner = self._runner
        return torch.ones(num, runner.hidden_size, dtype=runner.dtype, device=runner.device)

    def _wait(self) -> None:
        if self._runner.device.type == "cuda":
            torch.cuda.synchronize(self._runner.device)


def _level(num: int, context: int) -> TreeRows:
    """Returns a tree of a root and ``num`` - 1 children, after ``context`` committed tokens."""
    ids, tokens = np.arange(num), np.zeros(num, np.int64)
    parents = np.where(ids, 0, NO_NODE)
    return TreeRows.within(prefix_len=context, node_ids=ids, tokens=tokens, parent_ids=parents)


def measure_transfer(
    *, width: int, dtype: torch.dtype, tokens: Sequence[int], repeats: int
) -> list[Sample]:
    """Measures half of a round trip between two processes over gloo; a message is ``tokens`` rows
    of ``width`` values.
    """
    # Fresh processes: gloo's and torch's threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    sides = [(rank, store.port, width, dtype, tuple(tokens), repeats) for rank in (0, 1)]
    with context.Pool(2) as pool:
        try:
            times, _ = pool.starmap_async(_side, sides).get(_TIMEOUT_S)
        except Exception as error:  # the timeout, or an error of either process
            raise UserError(
                "two processes on this machine did not exchange messages over gloo on 127.0.0.1"
                f" within {_TIMEOUT_S:.0f} s ({type(error).__name__}: {error}): leave transfers out"
                " with profiling.transfer=false"
            ) from error
    return list(map(Sample, tokens, zip(*times[1:], strict=True)))


def _side(
    rank: int, port: int, width: int, dtype: torch.dtype, tokens: tuple[int, ...], repeats: int
) -> list[list[float]]:
    from specdec.distributed.transport import gloo_group

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    group: Any = gloo_group(store, rank, 2, loopback=True)  # stubs lack send and recv
    peer = 1 - rank
    rounds: list[list[float]] = []
    for _ in range(repeats + 1):
        rounds.append([])
        for num in tokens:
            rows = torch.ones(num, width, dtype=dtype)
            received = torch.empty_like(rows)
            posted = group.recv([received], peer, 0)  # posted ahead, as between stages
            start = perf_counter()
            if rank == 1:  # rank 0 sends and measures, rank 1 sends back
                posted.wait()
            sent = group.send([rows], peer, 0)
            if rank == 0:
                posted.wait()
            rounds[-1].append((perf_counter() - start) / 2 * 1e3)
            sent.wait()
    store.set(f"done/{rank}", "1")
    store.wait([f"done/{peer}"])  # the peer may still be reading
    return rounds
