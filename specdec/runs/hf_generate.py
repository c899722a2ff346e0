"""transformers' own ``generate`` as rows of our tables: same models, prompts, rules and counters.

Three kinds: ``hf_generate`` (plain), ``hf_assisted`` (draft model) and ``hf_prompt_lookup``. Hooks
and a streamer count passes and tokens, so rates are derived as for every other strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.generation import StoppingCriteriaList
from transformers.utils import logging as hf_logging

from specdec.errors import UserError
from specdec.metrics.counters import RequestCounters
from specdec.metrics.results import RequestResult, RunTotals
from specdec.models.quantize import num_bytes
from specdec.pairs import HuggingFacePair, ModelPair
from specdec.parts.fields import Count, Share, validated
from specdec.runs.hf_counting import EmissionLog, PassLog, StopStrings
from specdec.runs.runners import Book, TokenPrompt, sampling_params
from specdec.sampling.transform import SamplingParams
from specdec.state import TARGET_ORIGIN, StopRules
from specdec.types import IntArray, Lossless

HF_KINDS = ("hf_generate", "hf_assisted", "hf_prompt_lookup")
"""Names of the rows."""


@validated
@dataclass(frozen=True, slots=True, kw_only=True)
class HFOptions:
    """Settings of transformers' assisted decoding; the defaults are its own.

    Attributes:
        num_assistant_tokens: maximum draft tokens per pass.
        schedule: "constant", "heuristic" or "heuristic_transient".
        confidence_threshold: the draft stops below this probability; 0 for never.
        prompt_lookup_num_tokens: maximum tokens that prompt lookup proposes.
        max_matching_ngram: longest n-gram that prompt lookup matches.
    """

    num_assistant_tokens: Count = 20
    schedule: Literal["constant", "heuristic", "heuristic_transient"] = "constant"
    confidence_threshold: Share = 0.4
    prompt_lookup_num_tokens: Count = 10
    max_matching_ngram: Count = 2


class HFBaseline:
    """One kind of baseline on one model pair, as a ``Runner``; prompts are decoded one by one.

    Hooks and a neutral ``generation_config`` are on the models during ``generate_one`` only.
    """

    parts = None
    trace = None

    def __init__(
        self,
        *,
        kind: str,
        target: PreTrainedModel,
        stop: StopRules,
        sampling: SamplingParams,
        seed: int = 0,
        draft: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        options: HFOptions | None = None,
        name: str | None = None,
        weight_bytes: tuple[int, int] | None = None,
    ) -> None:
        """Prepares the settings.

        Args:
            kind: one of ``HF_KINDS``.
            target: the target model.
            draft: the draft model, for ``hf_assisted`` only.
            stop: as for our strategies; applied token by token to the output of ``generate``.
            sampling: as for our strategies.
            seed: of torch's global generator during ``generate``, combined with the prompt's id.
                Its draws differ from ours, so tokens are comparable under greedy decoding only.
            tokenizer: for ``RequestResult.text``.
            options: of assisted decoding.
            name: of the strategy. Default: ``kind``.
            weight_bytes: of target and draft. Default: those in memory.

        Raises:
            ValueError: an unknown kind, or a missing or unused draft.
        """
        if kind not in HF_KINDS:
            raise ValueError(f"{kind!r} is unknown: use one of {', '.join(HF_KINDS)}")
        if (draft is not None) != (kind == "hf_assisted"):
            needs = "needs" if kind == "hf_assisted" else "has no use for"
            raise ValueError(f"{kind} {needs} a draft model")
        self.kind, self.name = kind, name or kind
        self.claims = Lossless.TOKEN if sampling.greedy else Lossless.DISTRIBUTION
        self._weight_bytes = weight_bytes or (
            num_bytes(target),
            0 if draft is None else num_bytes(draft),
        )
        self._target, self._draft = target, draft
        self._stop, self._sampling, self._seed = stop, sampling, seed
        self._tokenizer = tokenizer
        self._options = options or HFOptions()
        self._config = self._generation_config()
        self._processors = LogitsProcessorList(sampling.processors)
        self._origin_s = perf_counter()

    @classmethod
    def of(cls, cfg: Mapping[str, Any], pair: ModelPair, stop: StopRules) -> HFBaseline:
        """The baseline of a configuration.

        Args:
            cfg: resolved configuration of a strategy of kind ``hf``.
            pair: target and draft, real models.
            stop: when requests are complete.

        Raises:
            UserError: a pair without real models.
        """
        name, kind = str(cfg["strategy"]["name"]), cfg["strategy"]["method"]
        if not isinstance(pair, HuggingFacePair):
            raise UserError(f"strategy={name} needs real models; use model=tiny or model=hf")
        return cls(
            kind=kind,
            name=name,
            target=pair.target,
            draft=pair.draft if kind == "hf_assisted" else None,
            stop=stop,
            sampling=sampling_params(cfg["sampling"]),
            seed=int(cfg["seed"]),
            tokenizer=pair.tokenizer,
            options=HFOptions(**cfg["strategy"]["options"]),
            weight_bytes=pair.weight_bytes,
        )

    def run(
        self,
        prompts: Sequence[TokenPrompt],
        on_finish: Callable[[RequestResult], None],
        book: Book | None = None,
    ) -> RunTotals:
        """Decodes the prompts one by one; see ``Runner``."""
        parts: list[RunTotals] = []
        for prompt in prompts:
            result, totals = self.generate_one(prompt.id, prompt.tokens)
            parts.append(totals)
            on_finish(result)
            if book is not None:
                book(result, totals)
        return RunTotals.merge(parts)

    def close(self) -> None:
        """Does nothing."""

    def generate_one(self, prompt_id: int, tokens: IntArray) -> tuple[RequestResult, RunTotals]:
        """Decodes one prompt.

        Args:
            prompt_id: keys the seed.
            tokens: int64[T >= 1].

        Returns:
            The request and its raw counts.
        """
        target_log, draft_log, emissions = PassLog(), PassLog(), EmissionLog()
        input_ids = torch.from_numpy(np.array(tokens, np.int64))[None].to(self._target.device)
        arguments: dict[str, Any] = {
            "attention_mask": torch.ones_like(input_ids),
            "generation_config": self._config,
            "logits_processor": self._processors,
            "streamer": emissions,
        }
        if self._draft is not None:
            arguments["assistant_model"] = self._draft
        if self._stop.stop_strings:
            criterion = StopStrings(self._stop, num_prompt=len(tokens))
            arguments["stopping_criteria"] = StoppingCriteriaList([criterion])
        with ExitStack() as stack:
            stack.enter_context(self._own_settings())
            stack.enter_context(self._own_generator(prompt_id))
            stack.enter_context(target_log.watching(self._target))
            if self._draft is not None:
                stack.enter_context(draft_log.watching(self._draft))
            stack.enter_context(torch.inference_mode())
            start = perf_counter()
            self._target.generate(input_ids, **arguments)
            wall_s = perf_counter() - start
        totals = self._totals(target_log, draft_log, emissions, len(tokens), wall_s)
        return self._result(prompt_id, len(tokens), start, target_log, emissions), totals

    # ------------------------------------------------------------------ settings

    def _generation_config(self) -> GenerationConfig:
        sampling, eos = self._sampling, sorted(self._stop.eos_ids)
        settings: dict[str, Any] = {
            "max_new_tokens": self._stop.max_new_tokens,
            "eos_token_id": eos or None,
            "pad_token_id": eos[0] if eos else 0,
            "do_sample": not sampling.greedy,
            "use_cache": True,
        }
        if not sampling.greedy:
            settings.update(temperature=sampling.temperature, top_p=sampling.top_p)
            settings["top_k"] = sampling.top_k
        if sampling.no_repeat_ngram:
            settings["no_repeat_ngram_size"] = sampling.no_repeat_ngram
        if self.kind == "hf_prompt_lookup":
            settings["prompt_lookup_num_tokens"] = self._options.prompt_lookup_num_tokens
            settings["max_matching_ngram_size"] = self._options.max_matching_ngram
        return GenerationConfig(**settings)

    @contextmanager
    def _own_settings(self) -> Iterator[None]:
        """Replaces the models' ``generation_config`` and silences transformers' warnings."""
        options = self._options
        replaced: list[tuple[Any, GenerationConfig]] = [(self._target, GenerationConfig())]
        if self._draft is not None:
            assistant = GenerationConfig(
                num_assistant_tokens=options.num_assistant_tokens,
                num_assistant_tokens_schedule=options.schedule,
                assistant_confidence_threshold=options.confidence_threshold,
            )
            replaced.append((self._draft, assistant))
        before = [model.generation_config for model, _ in replaced]
        verbosity = hf_logging.get_verbosity()
        hf_logging.set_verbosity_error()
        try:
            for model, config in replaced:
                model.generation_config = config
            yield
        finally:
            for (model, _), config in zip(replaced, before, strict=True):
                model.generation_config = config
            hf_logging.set_verbosity(verbosity)

    @contextmanager
    def _own_generator(self, prompt_id: int) -> Iterator[None]:
        """Seeds the global generator for one prompt and restores it afterwards."""
        if self._sampling.greedy:
            yield
            return
        devices = [self._target.device] if self._target.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            state = np.random.SeedSequence([self._seed, prompt_id]).generate_state(1, np.uint64)
            torch.manual_seed(int(state[0]))
            yield

    # ------------------------------------------------------------------ counts

    def _totals(
        self,
        target: PassLog,
        draft: PassLog,
        emissions: EmissionLog,
        num_prompt: int,
        wall_s: float,
    ) -> RunTotals:
        passes = len(emissions.chunks)
        assert len(target.rows) == passes, (
            f"{self.kind}: {len(target.rows)} target passes, {passes} emissions"
        )
        logs = {name: log for name, log in (("target", target), ("draft", draft)) if log.rows}
        return RunTotals(
            steps=passes,
            target_passes=passes,
            # The prefill's last row is answered like a tree node; the others are prompt rows.
            prefill_rows=num_prompt - 1,
            target_rows=sum(target.rows) - (num_prompt - 1),
            draft_passes=len(draft.rows),
            draft_rows=sum(draft.rows),
            wall_s=wall_s,
            clock_s=wall_s,
            draft_total_s=draft.seconds,
            model_s={name: log.seconds for name, log in logs.items()},
            model_calls={name: len(log.rows) for name, log in logs.items()},
            target_bytes=self._weight_bytes[0],
            draft_bytes=self._weight_bytes[1],
        )

    def _result(
        self, prompt_id: int, num_prompt: int, start: float, target: PassLog, log: EmissionLog
    ) -> RequestResult:
        decided = [token for chunk in log.chunks for token in chunk]
        reason, length = self._finish(decided)
        times = [t for chunk, t in zip(log.chunks, log.times, strict=True) for _ in chunk]
        origins = [o for chunk in log.chunks for o in [*[0] * (len(chunk) - 1), TARGET_ORIGIN]]
        counters = _counters(log.chunks, target.rows, num_prompt)
        counters.cut_tokens = len(decided) - length
        output = decided[:length]
        text = "" if self._tokenizer is None else str(self._tokenizer.decode(output))
        return RequestResult(
            id=prompt_id,
            num_prompt=num_prompt,
            output=tuple(output),
            origins=tuple(origins[:length]),
            finish_reason=reason,
            text=text,
            emitted_s=tuple(t - self._origin_s for t in times[:length]),
            arrival_s=start - self._origin_s,
            admitted_s=start - self._origin_s,
            counters=counters,
        )

    def _finish(self, decided: Sequence[int]) -> tuple[str, int]:
        """Applies the stop rules token by token; returns the reason and the output's length."""
        for length in range(1, len(decided) + 1):
            reason = self._stop.reason(decided[:length])
            if reason is not None:
                return reason, length
        return "cancelled", len(decided)


def _counters(chunks: list[list[int]], rows: list[int], num_prompt: int) -> RequestCounters:
    """Counts from the tokens emitted and the rows fed per target pass.

    A pass computes the last token and its candidates, the first one also the rest of the prompt,
    and emits the accepted candidates and one more token.
    """
    counters = RequestCounters()
    for i, chunk in enumerate(chunks):
        fed = rows[i] - (num_prompt if i == 0 else 1)
        accepted = len(chunk) - 1
        judged = accepted + (fed > accepted)
        counters.answers += 1
        counters.misses += 1  # a whole chain never contains the token after the accepted path
        counters.proposed += fed
        counters.accepted += accepted
        counters.verified += judged
        counters.path_lengths[accepted + 1] += 1
        counters.accepted_by_depth.update(range(1, accepted + 1))
        counters.judged_by_depth.update(range(1, judged + 1))
    return counters
