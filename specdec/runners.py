"""Runners: one strategy, ready to decode prompts, ours or transformers' own.

Both kinds hand back the same raw counts, so every rate of a table comes from the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Protocol

import torch

from specdec.baselines import HFBaseline, HFOptions
from specdec.clocks import ClockKind
from specdec.compose import compose
from specdec.errors import UserError
from specdec.metrics import RankCounts, RequestResult, RunTotals
from specdec.pairs import HuggingFacePair, ModelPair
from specdec.sampling import SamplingParams
from specdec.state import DecodeState, RequestState, StopRules
from specdec.trace.recorder import ObservedExecutor, RunTrace
from specdec.types import Commit, IntArray, Lossless
from specdec.workbench import Parts


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A tokenised prompt.

    Attributes:
        id: the prompt's id in its data set, which keys its randomness.
        tokens: int64[T].
    """

    id: int
    tokens: IntArray


class Runner(Protocol):
    """One strategy of a comparison."""

    name: str
    claims: Lossless

    def run(
        self, prompts: Sequence[TokenPrompt], on_finish: Callable[[RequestResult], None]
    ) -> RunTotals:
        """Decodes the prompts, reporting each as it finishes; returns the totals of this call."""
        ...

    def close(self) -> None: ...


class PartsRunner:
    """A strategy composed of parts, run by the one loop."""

    def __init__(
        self,
        *,
        cfg: Mapping[str, Any],
        pair: ModelPair,
        stop: StopRules,
        on_step: Callable[[DecodeState], None] | None = None,
    ) -> None:
        """Composes the strategy.

        Args:
            cfg: resolved configuration (see ``compose``).
            pair: target and draft.
            stop: when requests are complete.
            on_step: told of the state after each step of ``run``; may cancel requests.

        Raises:
            UserError: see ``compose``.
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

    def run(
        self, prompts: Sequence[TokenPrompt], on_finish: Callable[[RequestResult], None]
    ) -> RunTotals:
        """Decodes the prompts; see ``Runner``."""
        parts = self.parts
        parts.meter.reset()
        drafted = deepcopy(parts.source.counters)
        counted = replace(parts.executor.counters)
        ranks_before, began_s = RankCounts.of(parts.clock, parts.executor), parts.clock.now()
        if self.trace is not None:
            self.trace.begin_run(ranks_before.reports)
        state = parts.new_state()
        start = perf_counter()
        with torch.inference_mode():
            for _ in self.steps(state, prompts, lambda r: on_finish(self._result(r))):
                if self._on_step is not None:
                    self._on_step(state)
        wall_s = perf_counter() - start
        simulated = parts.clock.kind is ClockKind.SIMULATED
        totals = RunTotals(
            steps=state.step,
            wall_s=wall_s,
            clock_s=parts.clock.now() - began_s if simulated else wall_s,
            clock=parts.clock.kind.value,
            latency=parts.executor.latency,
            level_per_step=self._level_per_step,
            whole_tree=not self._pipelined,
        )
        counters = parts.executor.counters
        totals.target_passes = counters.passes - counted.passes
        totals.target_rows = counters.rows - counted.rows
        totals.prefill_passes = counters.prefill_passes - counted.prefill_passes
        totals.prefill_rows = counters.prefill_rows - counted.prefill_rows
        ranks = RankCounts.of(parts.clock, parts.executor)
        ranks.book(totals, ranks_before)
        if self.trace is not None:
            self.trace.end_run(ranks.reports)
        totals.target_bytes, totals.draft_bytes = self._pair.weight_bytes
        totals.add_source(parts.source.counters.since(drafted))
        totals.add_meter(parts.meter)
        return totals

    def steps(
        self,
        state: DecodeState,
        prompts: Sequence[TokenPrompt],
        on_finish: Callable[[RequestState], None],
    ) -> Iterator[list[Commit]]:
        """The loop over the prompts, step by step (streaming, checks between steps)."""
        parts = self.parts
        if self.trace is not None:
            observed = ObservedExecutor(executor=parts.executor, trace=self.trace)
            parts = replace(parts, executor=observed)
        arrival_s = parts.clock.now()
        requests = [
            RequestState(
                request_id=p.id,
                prompt=p.tokens,
                stop=self._stop,
                sampling=self._sampling,
                arrival_s=arrival_s,
            )
            for p in prompts
        ]
        return parts.decode(
            state,
            requests,
            batch_size=int(self._cfg["batch_size"]),
            prefill_chunk=int(self._cfg["prefill_chunk"]),
            on_finish=on_finish,
        )

    def close(self) -> None:
        """Releases the executor."""
        self.parts.executor.shutdown()

    @property
    def _pipelined(self) -> bool:
        return not getattr(self.parts.policy, "serial", True)

    @property
    def _level_per_step(self) -> bool:
        return getattr(self.parts.policy, "levels_per_step", None) == 1

    def _result(self, request: RequestState) -> RequestResult:
        tokenizer = self._pair.tokenizer
        text = "" if tokenizer is None else tokenizer.decode(request.output)
        return RequestResult.from_state(request, text=str(text))


class HFRunner:
    """transformers' own generate, for comparison."""

    def __init__(self, *, cfg: Mapping[str, Any], pair: ModelPair, stop: StopRules) -> None:
        """Prepares a baseline.

        Args:
            cfg: resolved configuration of a strategy of kind ``hf``.
            pair: target and draft; must be real models.
            stop: when requests are complete.

        Raises:
            UserError: if there are no real models, or for options that do not apply.
        """
        strategy = dict(cfg["strategy"])
        self.name = str(strategy["name"])
        if not isinstance(pair, HuggingFacePair):
            raise UserError(f"strategy={self.name} needs real models; use model=tiny or model=hf")
        sampling = sampling_params(cfg["sampling"])
        self.claims = Lossless.TOKEN if sampling.greedy else Lossless.DISTRIBUTION
        self._pair = pair
        assisted = strategy["method"] == "hf_assisted"
        self._baseline = HFBaseline(
            kind=strategy["method"],
            target=pair.target,
            draft=pair.draft if assisted else None,
            stop=stop,
            sampling=sampling,
            seed=int(cfg["seed"]),
            tokenizer=pair.tokenizer,
            options=HFOptions(**strategy["options"]),
        )

    def run(
        self, prompts: Sequence[TokenPrompt], on_finish: Callable[[RequestResult], None]
    ) -> RunTotals:
        """Decodes the prompts one by one; see ``Runner``."""
        self._baseline.take_totals()
        for prompt in prompts:
            on_finish(self._baseline.generate_one(prompt.id, prompt.tokens))
        totals = self._baseline.take_totals()
        totals.target_bytes, totals.draft_bytes = self._pair.weight_bytes
        return totals

    def close(self) -> None:
        """Nothing to release."""


def build_runner(cfg: Mapping[str, Any], pair: ModelPair, stop: StopRules) -> Runner:
    """The runner of one strategy: transformers' own for kind ``hf``, ours otherwise."""
    kind = HFRunner if cfg["strategy"]["kind"] == "hf" else PartsRunner
    return kind(cfg=cfg, pair=pair, stop=stop)


def sampling_params(cfg: Mapping[str, Any]) -> SamplingParams:
    """The sampling transform that ``sampling=`` describes.

    Raises:
        UserError: for a value out of range.
    """
    try:
        return SamplingParams(**cfg)
    except (TypeError, ValueError) as error:
        raise UserError(f"sampling: {error}") from error


__all__ = [
    "HFRunner",
    "PartsRunner",
    "Runner",
    "TokenPrompt",
    "build_runner",
    "sampling_params",
]
