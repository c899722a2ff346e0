"""Runners decode prompts with one strategy and return raw counts, from which rates are derived.

``PartsRunner`` runs this library's decode loop; ``hf_generate`` and ``rival`` run other programs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, Self

import torch
from transformers import PreTrainedTokenizerBase

from specdec.clocks import Clock, ClockKind, ClockReport, WallClock
from specdec.compose.workbench import Parts, compose
from specdec.data import Prompt
from specdec.errors import UserError
from specdec.interfaces import Executor
from specdec.metrics import RequestResult, RunTotals
from specdec.pairs import ModelPair
from specdec.sampling.transform import SamplingParams
from specdec.serving.arrivals import AT_ONCE, arrival_times
from specdec.state import DecodeState, RequestState, StopRules
from specdec.trace.recorder import ObservedExecutor, RunTrace
from specdec.types import Commit, IntArray, Lossless


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A tokenised prompt.

    Attributes:
        id: the prompt's id in its data set, which keys its random draws.
        tokens: int64[T].
        source: the prompt of the data set; None for tokens alone.
    """

    id: int
    tokens: IntArray
    source: Prompt | None = None


RUNTIMES = {"eager": "PyTorch", "onnx": "ONNX Runtime"}
"""Backend of a pair -> the program that runs its models."""

Book = Callable[[RequestResult, RunTotals], None]
"""Called once per finished request with the counts since the last call."""


class Runner(ABC):
    """Decodes with one strategy of a comparison.

    Attributes:
        claims: what its verifier guarantees.
        runtime: the program that runs the models, for rows and titles.
        parts: None for the decoding of other programs.
        trace: records the run for ``trace=true``; else None.
        pids: the run's other processes on this machine; None if they cannot be read.
    """

    name: str
    claims: Lossless
    runtime: str | None = None
    parts: Parts | None = None
    trace: RunTrace | None = None
    pids: Sequence[int] | None = ()

    @abstractmethod
    def run(
        self,
        prompts: Sequence[TokenPrompt],
        on_finish: Callable[[RequestResult], None],
        book: Book | None = None,
    ) -> RunTotals:
        """Decodes prompts and returns the totals of this call.

        Args:
            prompts: served together, up to ``batch_size`` at a time.
            on_finish: called with each finished request.
            book: called with each finished request and the counts since the last call.
        """

    def close(self) -> None:  # noqa: B027 - most baselines hold nothing
        """Releases models and processes. Default: does nothing."""


@dataclass(kw_only=True, eq=False)
class OneByOne(Runner):
    """Base class of baselines that decode one prompt per call of ``generate_one``.

    They claim greedy-exact or distribution-exact decoding.

    Attributes:
        weight_bytes: name of each model ("target", "draft") -> bytes of its weights.
        seed: combined with the prompt's id. The draws differ from this library's, so tokens are
            comparable under greedy decoding only.
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
        """Builds the baseline of a configuration; ``keys`` are the subclass's own fields."""
        return cls(
            name=str(cfg["strategy"]["name"]),
            stop=stop,
            sampling=sampling_params(cfg["sampling"]),
            seed=int(cfg["seed"]),
            tokenizer=pair.tokenizer,
            **{"weight_bytes": pair.weight_bytes, **keys},
        )

    def new_request(self, prompt: TokenPrompt) -> RequestState:
        """Returns a request that is submitted and admitted now."""
        request = RequestState(
            request_id=prompt.id, prompt=prompt.tokens, stop=self.stop, sampling=self.sampling
        )
        request.arrival_s = request.admitted_s = perf_counter() - self._origin_s
        return request

    @abstractmethod
    def generate_one(self, prompt: TokenPrompt) -> tuple[RequestResult, RunTotals]: ...

    def run(
        self,
        prompts: Sequence[TokenPrompt],
        on_finish: Callable[[RequestResult], None],
        book: Book | None = None,
    ) -> RunTotals:
        parts: list[RunTotals] = []
        for prompt in prompts:
            result, totals = self.generate_one(prompt)
            parts.append(totals)
            on_finish(result)
            if book is not None:
                book(result, totals)
        return RunTotals.merge(parts)


class PartsRunner(Runner):
    """Runs a strategy composed of parts in the decode loop."""

    def __init__(
        self,
        *,
        cfg: Mapping[str, Any],
        pair: ModelPair,
        stop: StopRules,
        on_step: Callable[[DecodeState], None] | None = None,
        new_request: Callable[[TokenPrompt, float], RequestState] | None = None,
    ) -> None:
        """Composes the strategy; see ``compose`` for errors.

        Args:
            on_step: called with the state after each step of ``run``; may cancel requests.
            new_request: makes a request from a prompt and its arrival time; by default one with
                ``stop`` and the sampling of ``cfg``.
        """
        self.name = str(cfg["strategy"]["name"])
        self.parts: Parts = compose(cfg, pair)
        self.runtime = RUNTIMES.get(pair.backend or "")
        self.pids = self.parts.executor.pids
        self.claims = self.parts.verifier.lossless
        self.trace = RunTrace(self.parts.clock) if cfg.get("trace") else None
        self._cfg = cfg
        self._stop = stop
        self._pair = pair
        self._sampling = sampling_params(cfg["sampling"])
        self._on_step = on_step
        self._new_request = new_request or self._plain_request

    def run(
        self,
        prompts: Sequence[TokenPrompt],
        on_finish: Callable[[RequestResult], None],
        book: Book | None = None,
    ) -> RunTotals:
        steps = self.in_steps(prompts, on_finish, book)
        with torch.inference_mode():
            while True:
                try:
                    next(steps)
                except StopIteration as end:
                    totals: RunTotals = end.value
                    return totals

    def in_steps(
        self,
        prompts: Sequence[TokenPrompt],
        on_finish: Callable[[RequestResult], None],
        book: Book | None = None,
    ) -> Generator[None, None, RunTotals]:
        """Runs like ``run``, but yields after each step of the loop, and returns the totals."""
        state = self.parts.new_state()
        counts = RunBook(self.parts, state, self._new_totals)
        if self.trace is not None:
            self.trace.begin_run(counts.reports)
        totals: list[RunTotals] = []
        left = len(prompts)

        def finished(request: RequestState) -> None:
            nonlocal left
            left -= 1
            totals.append(counts.take(at_end=not left))
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
        return RunTotals.merge(totals) if totals else self._new_totals()

    def _new_totals(self) -> RunTotals:
        """Creates totals with the flags of this strategy and no counts."""
        latency = self.parts.executor.latency
        totals = RunTotals(
            clock=self.parts.clock.kind.value,
            latency=latency,
            level_per_step=latency is not None and self.parts.policy.levels_per_step == 1,
            whole_tree=self.parts.policy.serial,
            kv_budget_tokens=self.parts.serving.kv_tokens,
        )
        source = self.parts.source
        sizes, read = self._pair.weight_bytes, source.pass_bytes
        totals.target_bytes = sizes["target"]
        totals.draft_bytes = sizes.get(source.model, 0) if read is None else read
        if latency is not None:
            totals.law = source.speedup_law(self.parts.policy, latency)
        return totals

    def steps(
        self,
        state: DecodeState,
        prompts: Sequence[TokenPrompt],
        on_finish: Callable[[RequestState], None],
    ) -> Iterator[list[Commit]]:
        """Runs the decode loop over prompts served together; yields the commits of each step."""
        parts = self.parts
        if self.trace is not None:
            observed = ObservedExecutor(executor=parts.executor, trace=self.trace)
            parts = replace(parts, executor=observed)
        serving = self._cfg.get("serving") or {}
        arrivals = parts.clock.now() + arrival_times(
            serving.get("arrivals", AT_ONCE),
            len(prompts),
            rate_per_s=serving.get("rate_per_s"),
            seed=int(self._cfg["seed"]),
        )
        requests = [
            self._new_request(prompt, arrival_s)
            for prompt, arrival_s in zip(prompts, arrivals.tolist(), strict=True)
        ]
        return parts.decode(
            state,
            requests,
            batch_size=int(self._cfg["batch_size"]),
            prefill_chunk=int(self._cfg["prefill_chunk"]),
            on_finish=on_finish,
        )

    def _plain_request(self, prompt: TokenPrompt, arrival_s: float) -> RequestState:
        return RequestState(
            request_id=prompt.id,
            prompt=prompt.tokens,
            stop=self._stop,
            sampling=self._sampling,
            arrival_s=arrival_s,
        )

    def close(self) -> None:
        self.parts.executor.shutdown()


def result_of(request: RequestState, tokenizer: PreTrainedTokenizerBase | None) -> RequestResult:
    """Builds the result of a request that is complete or cancelled."""
    return RequestResult(
        id=request.id,
        num_prompt=request.num_prompt,
        output=tuple(request.output),
        origins=tuple(request.output_origins),
        finish_reason=request.finish_reason or "cancelled",
        text="" if tokenizer is None else str(tokenizer.decode(request.output)),
        emitted_s=tuple(request.emitted_s),
        arrival_s=request.arrival_s,
        admitted_s=request.admitted_s,
        counters=request.counters,
    )


def sampling_params(cfg: Mapping[str, Any]) -> SamplingParams:
    try:
        return SamplingParams(**cfg)
    except (TypeError, ValueError) as error:
        raise UserError(f"sampling: {error}") from error


class RunBook:
    """Counts the work between two calls of ``take``; the sum over all calls is the run's.

    Counts of other processes are read at the end of the run only, since reading them stalls the
    pipeline; until then they are zero. ``reports`` are those of all wall clocks as last read.
    """

    def __init__(self, parts: Parts, state: DecodeState, new_totals: Callable[[], RunTotals]):
        """Starts counting; ``new_totals`` creates totals with the run's flags and no counts."""
        self._parts, self._state, self._new_totals = parts, state, new_totals
        self._restart(self._read(ranks=True))

    def take(self, *, at_end: bool = False) -> RunTotals:
        """Returns the counts since the last call; ``at_end`` also reads other processes' counts."""
        wall_s = self._now() - self._wall_s
        counts = self._read(ranks=at_end or not self._parts.executor.distributed)
        totals, meter = counts.since(self._counts), self._parts.meter
        totals.model_s, totals.model_calls = dict(meter.model_s), dict(meter.calls)
        totals.wait_s, totals.wall_s = meter.wait_s, wall_s
        if self._parts.clock.drafted is None:
            totals.draft_total_s = meter.draft_s
        if self._parts.clock.kind is not ClockKind.SIMULATED:
            totals.clock_s = wall_s
        self._restart(counts)
        return totals

    def resume(self) -> None:
        """Excludes the wall time since the last ``take``, in which results were written."""
        self._wall_s = self._now()

    def _now(self) -> float:
        """Returns the wall time, without the intervals that ``MeasuredClock.skip`` left out."""
        clock = self._parts.clock
        return clock.now() if clock.kind is ClockKind.MEASURED else perf_counter()

    def _restart(self, counts: RunTotals) -> None:
        self._counts = counts
        self._parts.meter.reset()
        self.resume()

    def _read(self, *, ranks: bool) -> RunTotals:
        """Reads the cumulative counts; unless ``ranks``, repeats those of other processes."""
        parts, load = self._parts, self._state.load
        source, executor = parts.source.counters, parts.executor.counters
        clock_s = parts.clock.now()
        if ranks:
            self._ranks, self.reports = rank_counts(parts.clock, parts.executor)
        return replace(
            self._new_totals(),
            steps=self._state.step,
            clock_s=clock_s,
            target_passes=executor.passes,
            target_rows=executor.rows,
            prefill_passes=executor.prefill_passes,
            prefill_rows=executor.prefill_rows,
            draft_passes=source.passes,
            draft_rows=source.rows,
            draft_catch_up_rows=source.catch_up_rows,
            draft_passes_by_level=dict(source.by_level),
            request_steps=load.request_steps,
            kv_token_steps=load.kv_token_steps,
            kv_peak_tokens=load.kv_peak_tokens,
            **self._ranks,
        )


def rank_counts(clock: Clock, executor: Executor) -> tuple[dict[str, Any], tuple[ClockReport, ...]]:
    """Reads the cumulative counts of every rank, by one message to each other process.

    Returns:
        Fields of ``RunTotals``, on a measured clock without ``draft_total_s``, which the meter
        counts instead; and the reports of the ranks' wall clocks, spans included.
    """
    simulated, paced = (clock.kind is k for k in (ClockKind.SIMULATED, ClockKind.PACED))
    answers = () if simulated else executor.reports()
    workers = [ClockReport.from_json(report["clock"]) for report in answers]
    shared = () if simulated else executor.draft_reports()
    followers = [ClockReport.from_json(report["clock"]) for report in shared]
    own = [clock.report()] if isinstance(clock, WallClock) else []
    reports = (*own, *workers, *followers)
    busy_s = {r.rank: r.busy_s for r in workers} if workers else None
    if simulated:
        charged = clock.busy_s
        busy_s = None if charged is None else {r: s for r, s in charged.items() if r > 0}
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
