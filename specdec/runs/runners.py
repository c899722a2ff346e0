"""Runners decode prompts with one strategy and return raw counts, from which rates are derived.

``PartsRunner`` runs this library's decode loop; ``hf_generate`` and ``rival`` run other programs.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from transformers import PreTrainedTokenizerBase

from specdec.compose.build import compose
from specdec.compose.workbench import Parts
from specdec.data import Prompt
from specdec.errors import UserError
from specdec.metrics import RequestResult, RunTotals
from specdec.pairs import ModelPair
from specdec.runs.totals import RunBook
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


Book = Callable[[RequestResult, RunTotals], None]
"""Called once per finished request with the counts since the last call."""


class Runner(Protocol):
    """Decodes with one strategy of a comparison.

    Attributes:
        claims: what its verifier guarantees.
        parts: None for the decoding of other programs.
        trace: records the run for ``trace=true``; else None.
    """

    name: str
    claims: Lossless

    @property
    def parts(self) -> Parts | None: ...

    @property
    def trace(self) -> RunTrace | None: ...

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
        ...

    def close(self) -> None: ...


class PartsRunner:
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
            self.trace.begin_run(counts.ranks.reports)
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
            self.trace.end_run(counts.ranks.reports)
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


def run_one_by_one(
    prompts: Sequence[TokenPrompt],
    decode_one: Callable[[TokenPrompt], tuple[RequestResult, RunTotals]],
    on_finish: Callable[[RequestResult], None],
    book: Book | None = None,
) -> RunTotals:
    """Implements ``Runner.run`` for baselines that decode one prompt per call."""
    parts: list[RunTotals] = []
    for prompt in prompts:
        result, totals = decode_one(prompt)
        parts.append(totals)
        on_finish(result)
        if book is not None:
            book(result, totals)
    return RunTotals.merge(parts)


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
