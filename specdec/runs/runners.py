"""Runners decode prompts with one strategy and return raw counts; rates are derived from them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from time import perf_counter
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from specdec.clocks import Clock, ClockKind, ClockReport, MeasuredClock, WallClock
from specdec.compose.workbench import Parts, compose
from specdec.data import Prompt
from specdec.errors import UserError
from specdec.interfaces import Executor
from specdec.metrics import RequestResult, RunTotals
from specdec.metrics.counters import difference
from specdec.pairs import ModelPair
from specdec.report.tables import RUNTIMES
from specdec.sampling.transform import SamplingParams
from specdec.serving.arrivals import AT_ONCE, arrival_times
from specdec.sources import Background
from specdec.state import TARGET_ORIGIN, DecodeState, RequestState, StopRules
from specdec.trace.recorder import ObservedExecutor, RunTrace
from specdec.types import Commit, IntArray, Lossless

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    id: int  # in its data set; keys the random draws
    tokens: IntArray  # int64[T]
    source: Prompt | None = None  # None for tokens alone

    def request(self, stop: StopRules, sampling: SamplingParams, at_s: float) -> RequestState:
        return RequestState(
            request_id=self.id, prompt=self.tokens, stop=stop, sampling=sampling, arrival_s=at_s
        )


Prompts = Sequence[TokenPrompt]

TURN_S = 0.1  # long enough for some passes of a small model, so that few of them find cold caches

OnFinish = Callable[[RequestResult], None]
Book = Callable[[RequestResult, RunTotals], None]
"""A function that gets each finished request's result and the counts since the last call."""


class Runner(ABC):
    name: str
    claims: Lossless  # what its verifier guarantees
    runtime: str | None = None  # the program that runs the models, for tables
    caveat: str = ""  # of other programs: what ran there, and why rows are not comparable
    parts: Parts | None = None  # None for the decoding of other programs
    trace: RunTrace | None = None  # records the run for ``trace=true``
    warming_up = False  # whether the present run is a warm-up, which is not counted
    pids: Sequence[int] | None = ()  # its other processes here; None if they cannot be read

    @abstractmethod
    def run(self, prompts: Prompts, on_finish: OnFinish, book: Book | None = None) -> RunTotals:
        """Decodes prompts, up to ``batch_size`` at a time, and returns the totals of this call."""

    def close(self) -> None:  # noqa: B027 - most baselines hold nothing
        """Releases models and processes. Default: does nothing."""


@dataclass(kw_only=True, eq=False)
class OneByOne(Runner):
    """Base class of baselines that decode one prompt per call; ``weight_bytes``: model -> bytes.

    Their random numbers differ from this library's, so only greedy tokens can be compared.
    """

    name: str = ""
    stop: StopRules
    sampling: SamplingParams
    seed: int = 0
    tokenizer: PreTrainedTokenizerBase | None = None
    weight_bytes: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.claims = Lossless.TOKEN if self.sampling.greedy else Lossless.DISTRIBUTION
        self._origin_s = perf_counter()

    @classmethod
    def of(cls, cfg: Mapping[str, Any], pair: ModelPair, stop: StopRules, **keys: Any) -> Self:
        return cls(
            name=str(cfg["strategy"]["name"]),
            stop=stop,
            sampling=sampling_params(cfg["sampling"]),
            seed=int(cfg["seed"]),
            tokenizer=pair.tokenizer,
            **{"weight_bytes": pair.weight_bytes, **keys},
        )

    def new_request(self, prompt: TokenPrompt) -> RequestState:
        request = prompt.request(self.stop, self.sampling, perf_counter() - self._origin_s)
        request.admitted_s = request.arrival_s
        return request

    def seed_of(self, prompt: TokenPrompt, dtype: Any = np.uint32) -> int:
        state = np.random.SeedSequence([self.seed, prompt.id]).generate_state(1, dtype)
        return int(state[0])

    def new_totals(self, passes: int, wall_s: float, **counts: Any) -> RunTotals:
        return RunTotals(
            steps=passes,
            target_passes=passes,
            wall_s=wall_s,
            clock_s=wall_s,
            target_bytes=self.weight_bytes["target"],
            draft_bytes=self.weight_bytes.get("draft", 0),
            **counts,
        )

    @abstractmethod
    def generate_one(self, prompt: TokenPrompt) -> tuple[RequestResult, RunTotals]: ...

    def run(self, prompts: Prompts, on_finish: OnFinish, book: Book | None = None) -> RunTotals:
        parts: list[RunTotals] = []
        for prompt in prompts:
            result, totals = self.generate_one(prompt)
            parts.append(totals)
            on_finish(result)
            if book is not None:
                book(result, totals)
        return RunTotals.merge(parts)


class PartsRunner(Runner):
    def __init__(
        self,
        *,
        cfg: Mapping[str, Any],
        pair: ModelPair,
        stop: StopRules,
        on_step: Callable[[DecodeState], None] | None = None,
        new_request: Callable[[TokenPrompt, float], RequestState] | None = None,
    ) -> None:
        """Composes the strategy. ``on_step`` is called with the state after each step of ``run``,
        and may cancel requests; ``new_request`` makes requests from a prompt and an arrival time.
        """
        self.name = str(cfg["strategy"]["name"])
        self.parts: Parts = compose(cfg, pair)
        self.runtime = RUNTIMES.get(pair.backend or "")
        self.pids = self.parts.executor.pids
        self.claims = self.parts.verifier.lossless
        self.trace = RunTrace(self.parts.clock) if cfg.get("trace") else None
        self._cfg, self._pair = cfg, pair
        self._on_step, sampling = on_step, sampling_params(cfg["sampling"])
        self._new_request = new_request or (lambda own, at_s: own.request(stop, sampling, at_s))

    def run(self, prompts: Prompts, on_finish: OnFinish, book: Book | None = None) -> RunTotals:
        steps = self.in_steps(prompts, on_finish, book)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]

    def in_steps(
        self, prompts: Prompts, on_finish: OnFinish, book: Book | None = None
    ) -> Generator[None, None, RunTotals]:
        state = self.parts.new_state()
        state.warm_up = self.warming_up
        counts = RunBook(self.parts, state)
        source, policy, latency = self.parts.source, self.parts.policy, self.parts.executor.latency
        sizes, read = self._pair.weight_bytes, source.pass_bytes
        none = RunTotals(  # the flags of this strategy without counts
            clock=self.parts.clock.kind.value,
            latency=latency,
            level_per_step=latency is not None and policy.levels_per_step == 1,
            whole_tree=policy.serial,
            kv_budget_tokens=self.parts.serving.kv_tokens,
            target_bytes=sizes["target"],
            draft_bytes=sizes.get(source.model, 0) if read is None else read,
            law=None if latency is None else source.speedup_law(policy, latency),
        )
        if self.trace is not None:
            self.trace.begin_run(counts.reports)
        totals: list[RunTotals] = []

        def finished(request: RequestState) -> None:
            totals.append(replace(none, **counts.take(at_end=len(totals) + 1 == len(prompts))))
            result = result_of(request, self._pair.tokenizer)
            on_finish(result)
            if book is not None:
                book(result, totals[-1])
            counts.resume()

        for _ in self.steps(state, prompts, finished):
            if self._on_step is not None:
                self._on_step(state)
            yield
        if self.trace is not None:
            self.trace.end_run(counts.reports)
        return RunTotals.merge(totals or [none])

    def steps(
        self, state: DecodeState, prompts: Prompts, on_finish: Callable[[RequestState], None]
    ) -> Iterator[list[Commit]]:
        parts, serving = self.parts, self._cfg.get("serving") or {}
        if self.trace is not None:
            observed = ObservedExecutor(executor=parts.executor, trace=self.trace)
            parts = replace(parts, executor=observed)
        kind, rate = serving.get("arrivals", AT_ONCE), serving.get("rate_per_s")
        arrivals = arrival_times(kind, len(prompts), rate_per_s=rate, seed=int(self._cfg["seed"]))
        at_s = (parts.clock.now() + arrivals).tolist()
        return parts.decode(
            state,
            [self._new_request(*pair) for pair in zip(prompts, at_s, strict=True)],
            batch_size=int(self._cfg["batch_size"]),
            prefill_chunk=int(self._cfg["prefill_chunk"]),
            on_finish=on_finish,
        )

    def close(self) -> None:
        self.parts.executor.shutdown()


def run_interleaved(
    runners: Sequence[PartsRunner], prompts: Prompts
) -> list[tuple[list[RequestResult], RunTotals]]:
    """Decodes the prompts with every runner, in turns of 0.1 s.

    The speed of a machine changes within seconds (clock frequency, other users of its memory). Runs
    of half a second, one after the other, then differ by more than the strategies do; short turns
    make such a change affect all strategies alike. A runner's measured clock is stopped while
    others run. A runner whose draft works in a thread, which cannot be stopped, has a single turn.

    Returns per runner the requests, in the order of finishing, and the totals.
    """
    results: list[list[RequestResult]] = [[] for _ in runners]
    totals: dict[int, RunTotals] = {}
    pairs = zip(runners, results, strict=True)
    steps = [runner.in_steps(prompts, found.append) for runner, found in pairs]
    paused: dict[int, float] = {}
    waiting = [*range(len(runners))]
    while waiting:
        at = waiting.pop(0)
        clock, began = runners[at].parts.clock, perf_counter()
        assert isinstance(clock, MeasuredClock), "turns need a measured clock"
        clock.skip(began - paused.get(at, began))
        turn_s = inf if isinstance(runners[at].parts.source, Background) else TURN_S
        try:
            next(steps[at])
            while perf_counter() - began < turn_s:
                next(steps[at])
            waiting.append(at)
        except StopIteration as end:
            totals[at] = end.value
        paused[at] = perf_counter()
    return [(found, totals[at]) for at, found in enumerate(results)]


def result_of(request: RequestState, tokenizer: PreTrainedTokenizerBase | None) -> RequestResult:
    return RequestResult(
        id=request.id,
        num_prompt=request.num_prompt,
        output=tuple(request.output),
        origins=tuple(request.output_origins),
        finish_reason=request.finish_reason or "cancelled",
        text=decoded(request.output, tokenizer),
        emitted_s=tuple(request.emitted_s),
        arrival_s=request.arrival_s,
        admitted_s=request.admitted_s,
        counters=request.counters,
    )


def decoded(tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Decodes without special tokens such as ``<|im_end|>``; "" without a tokenizer."""
    return "" if tokenizer is None else str(tokenizer.decode([*tokens], skip_special_tokens=True))


def emit(request: RequestState, tokens: Sequence[int], times_s: Sequence[float]) -> None:
    """Adds a target pass's tokens to a request: drafted ones, and the target's own as the last."""
    origins = [*[0] * (len(tokens) - 1), TARGET_ORIGIN]
    for token, origin, at_s in zip(tokens, origins, times_s, strict=True):
        if request.finished:
            request.counters.cut_tokens += 1
        else:
            request.emit(token, origin, at_s)


def sampling_params(cfg: Mapping[str, Any]) -> SamplingParams:
    try:
        return SamplingParams(**cfg)
    except (TypeError, ValueError) as error:
        raise UserError(f"sampling: {error}") from error


class RunBook:
    """Counts the work between two calls of ``take``; the sum over all calls is the work of the run.

    Counts of other processes are read only at the end of a run, since reading them stalls the
    pipeline; until then they are zero. ``reports`` has the last report of each process's clock.
    """

    def __init__(self, parts: Parts, state: DecodeState) -> None:
        self._parts, self._state = parts, state
        self._counts: dict[str, Any] = {}
        self.resume()
        self.take(at_end=True)

    def resume(self) -> None:
        """Excludes the wall time since the last ``take``, in which results were written."""
        self._wall_s = self._now()

    def _now(self) -> float:
        """Returns the wall time, without the intervals that ``MeasuredClock.skip`` left out."""
        clock = self._parts.clock
        return clock.now() if clock.kind is ClockKind.MEASURED else perf_counter()

    def take(self, *, at_end: bool = False) -> dict[str, Any]:
        """Returns ``RunTotals`` fields since the last call; ``at_end`` reads other processes."""
        wall_s, parts, load = self._now() - self._wall_s, self._parts, self._state.load
        source, executor, meter = parts.source.counters, parts.executor.counters, parts.meter
        if at_end or not parts.executor.distributed:
            self._ranks, self.reports = rank_counts(parts.clock, parts.executor)
        counts = {
            "steps": self._state.step,
            "clock_s": parts.clock.now(),
            "target_passes": executor.passes,
            "target_rows": executor.rows,
            "prefill_passes": executor.prefill_passes,
            "prefill_rows": executor.prefill_rows,
            "draft_passes": source.passes,
            "draft_rows": source.rows,
            "draft_catch_up_rows": source.catch_up_rows,
            "draft_passes_by_level": dict(source.by_level),
            "request_steps": load.request_steps,
            "kv_token_steps": load.kv_token_steps,
            **self._ranks,
        }
        since = difference(counts, self._counts or counts)
        since |= {"model_s": dict(meter.model_s), "model_calls": dict(meter.calls)}
        since |= {"wait_s": meter.wait_s, "wall_s": wall_s, "kv_peak_tokens": load.kv_peak_tokens}
        if parts.clock.drafted is None:
            since["draft_total_s"] = meter.draft_s
        if parts.clock.kind is not ClockKind.SIMULATED:
            since["clock_s"] = wall_s
        self._counts = counts
        meter.reset()
        self.resume()
        return since


def rank_counts(clock: Clock, executor: Executor) -> tuple[dict[str, Any], tuple[ClockReport, ...]]:
    """Returns the cumulative counts of all ranks (processes) as ``RunTotals`` fields (on a measured
    clock without ``draft_total_s``), and their clocks' reports; asks each other process once.
    """
    simulated, paced = (clock.kind is k for k in (ClockKind.SIMULATED, ClockKind.PACED))
    answers, shared = ((), ()) if simulated else (executor.reports(), executor.draft_reports())
    workers = [ClockReport.from_json(answer["clock"]) for answer in answers]
    followers = [ClockReport.from_json(answer["clock"]) for answer in shared]
    own = [clock.report()] if isinstance(clock, WallClock) else []
    reports = (*own, *workers, *followers)
    busy_s = {r.rank: r.busy_s for r in workers} if workers else None
    if simulated and clock.busy_s is not None:
        busy_s = {rank: seconds for rank, seconds in clock.busy_s.items() if rank > 0}
    sent = sum(report["bytes_sent"] for report in answers) + executor.bytes_sent
    counts = {
        "stage_busy_s": busy_s,
        "paced_pieces": sum(r.pieces for r in reports) if paced else None,
        "overruns": sum(r.overruns for r in reports) if paced else None,
        "bytes_sent": sent if workers else None,
        "draft_hidden_s": None,
    }
    if clock.drafted is not None:
        counts["draft_total_s"] = clock.drafted.total_s
        counts["draft_hidden_s"] = clock.drafted.hidden_s
    return counts, reports
