"""transformers' own ``generate`` as rows of our tables: same models, prompts, rules and counters.

Three kinds: ``hf_generate`` (plain), ``hf_assisted`` (draft model) and ``hf_prompt_lookup``. They
run with transformers' defaults for assisted decoding, which are its best general settings, and
are watched from outside, so that rates come from the same counts as everybody else's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal, Protocol

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation import StoppingCriteriaList
from transformers.utils import logging as hf_logging

from specdec.metrics.counters import RequestCounters
from specdec.metrics.results import RequestResult, RunTotals
from specdec.parts.fields import Count, Share
from specdec.runs.hf_counting import EmissionLog, PassLog, StopStrings
from specdec.sampling.transform import SamplingParams
from specdec.state import TARGET_ORIGIN, StopRules
from specdec.types import IntArray

HF_KINDS = ("hf_generate", "hf_assisted", "hf_prompt_lookup")
"""Names of the rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HFOptions:
    """Settings of transformers' assisted decoding; the defaults are its own.

    Attributes:
        num_assistant_tokens: draft tokens per pass at most.
        schedule: "constant", "heuristic" or "heuristic_transient".
        confidence_threshold: the draft stops below this probability; 0 turns it off.
        prompt_lookup_num_tokens: tokens that prompt lookup proposes at most.
        max_matching_ngram: longest n-gram that prompt lookup matches.
    """

    num_assistant_tokens: Count = 20
    schedule: Literal["constant", "heuristic", "heuristic_transient"] = "constant"
    confidence_threshold: Share = 0.4
    prompt_lookup_num_tokens: Count = 10
    max_matching_ngram: Count = 2


class Detokenizer(Protocol):
    """What is needed of a tokenizer here."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids."""
        ...


class HFBaseline:
    """One kind of baseline on one model pair; prompts are decoded one by one.

    Nothing stays on the models: hooks and the replaced ``generation_config`` (whose defaults would
    leak into the rules) are there only while ``generate_one`` runs.
    """

    def __init__(
        self,
        *,
        kind: str,
        target: PreTrainedModel,
        stop: StopRules,
        sampling: SamplingParams,
        seed: int = 0,
        draft: PreTrainedModel | None = None,
        tokenizer: Detokenizer | None = None,
        options: HFOptions | None = None,
        watch: bool = True,
    ) -> None:
        """Prepares the settings.

        Args:
            kind: one of ``HF_KINDS``.
            target, draft: the models; a draft for ``hf_assisted`` and only there.
            stop: as for our strategies; applied again token by token to what ``generate`` emits.
            sampling: as for our strategies.
            seed: of the global generator that ``generate`` draws from, mixed with the prompt's id.
                Its draws are not ours, so tokens are comparable under greedy decoding only.
            tokenizer: for ``RequestResult.text``.
            options: of assisted decoding.
            watch: False leaves out the hooks (passes are then not counted), to measure their cost.

        Raises:
            ValueError: unknown kind, a draft too few or too many.
        """
        if kind not in HF_KINDS:
            raise ValueError(f"{kind!r} is unknown: use one of {', '.join(HF_KINDS)}")
        if (draft is not None) != (kind == "hf_assisted"):
            needs = "needs" if kind == "hf_assisted" else "has no use for"
            raise ValueError(f"{kind} {needs} a draft model")
        self.kind = kind
        self._target, self._draft = target, draft
        self._stop, self._sampling, self._seed = stop, sampling, seed
        self._tokenizer = tokenizer
        self._options = options or HFOptions()
        self._watch = watch
        self._config = self._generation_config()
        self._processors = LogitsProcessorList(sampling.processors)
        self._origin_s = perf_counter()
        self._totals = self._fresh_totals()

    def generate_one(self, prompt_id: int, tokens: IntArray) -> RequestResult:
        """Decodes one prompt.

        Args:
            prompt_id: keys the seed.
            tokens: int64[T >= 1].
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
            if self._watch:
                stack.enter_context(target_log.watching(self._target))
                if self._draft is not None:
                    stack.enter_context(draft_log.watching(self._draft))
            stack.enter_context(torch.inference_mode())
            start = perf_counter()
            self._target.generate(input_ids, **arguments)
            wall_s = perf_counter() - start
        self._count(target_log, draft_log, emissions, num_prompt=len(tokens), wall_s=wall_s)
        return self._result(prompt_id, len(tokens), start, target_log, emissions)

    def take_totals(self) -> RunTotals:
        """Totals of the prompts since the last call."""
        totals, self._totals = self._totals, self._fresh_totals()
        return totals

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
        """Replaces the models' ``generation_config``, so that none of its defaults leak in.

        Quiet, too: assisted decoding warns about how it calls ``generate`` itself.
        """
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
        """Seeds the global generator for one prompt and puts its state back afterwards."""
        if self._sampling.greedy:
            yield
            return
        devices = [self._target.device] if self._target.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            state = np.random.SeedSequence([self._seed, prompt_id]).generate_state(1, np.uint64)
            torch.manual_seed(int(state[0]))
            yield

    # ------------------------------------------------------------------ counts

    def _fresh_totals(self) -> RunTotals:
        return RunTotals(
            target_bytes=weight_bytes(self._target),
            draft_bytes=weight_bytes(self._draft) if self._draft is not None else 0,
        )

    def _count(
        self,
        target: PassLog,
        draft: PassLog,
        emissions: EmissionLog,
        *,
        num_prompt: int,
        wall_s: float,
    ) -> None:
        totals = self._totals
        passes = len(emissions.chunks)
        assert not self._watch or len(target.rows) == passes, (
            f"{self.kind}: {len(target.rows)} target passes, {passes} emissions"
        )
        totals.steps += passes
        totals.target_passes += passes
        # The prefill's last row is answered like a tree node; the others are prompt rows.
        totals.prefill_rows += num_prompt - 1
        totals.target_rows += sum(target.rows) - (num_prompt - 1 if target.rows else 0)
        totals.draft_passes += len(draft.rows)
        totals.draft_rows += sum(draft.rows)
        totals.wall_s += wall_s
        totals.clock_s += wall_s
        totals.draft_total_s += draft.seconds
        for name, log in (("target", target), ("draft", draft)):
            if log.rows:
                totals.model_s[name] = totals.model_s.get(name, 0.0) + log.seconds
                totals.model_calls[name] = totals.model_calls.get(name, 0) + len(log.rows)

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
        text = ""
        if self._tokenizer is not None:
            text = self._tokenizer.decode(output)
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
        """Applies the stop rules token by token: the reason and the tokens that remain."""
        if not self._stop.stop_strings:  # without them the rules need one look, not one per token
            ends = [i for i, token in enumerate(decided) if token in self._stop.eos_ids]
            length = min([*(i + 1 for i in ends[:1]), self._stop.max_new_tokens, len(decided)])
            return self._stop.reason(decided[:length]) or "cancelled", length
        for length in range(1, len(decided) + 1):
            reason = self._stop.reason(decided[:length])
            if reason is not None:
                return reason, length
        return "cancelled", len(decided)


def run_hf(
    *,
    kind: str,
    target: PreTrainedModel,
    draft: PreTrainedModel | None,
    prompts: Sequence[tuple[int, IntArray]],
    stop: StopRules,
    sampling: SamplingParams,
    seed: int = 0,
    tokenizer: Detokenizer | None = None,
    options: HFOptions | None = None,
) -> tuple[list[RequestResult], RunTotals]:
    """Decodes prompts one after the other.

    Args:
        prompts: (id, int64[T]) per prompt.
        kind, target, draft, stop, sampling, seed, tokenizer, options: as of ``HFBaseline``; a
            draft that the kind has no use for is ignored.
    """
    baseline = HFBaseline(
        kind=kind,
        target=target,
        draft=draft if kind == "hf_assisted" else None,
        stop=stop,
        sampling=sampling,
        seed=seed,
        tokenizer=tokenizer,
        options=options,
    )
    results = [baseline.generate_one(prompt_id, tokens) for prompt_id, tokens in prompts]
    return results, baseline.take_totals()


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of a model's weights; tied ones count once."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def _counters(chunks: list[list[int]], rows: list[int], num_prompt: int) -> RequestCounters:
    """Counts from tokens emitted and rows fed per target pass.

    A pass feeds the last token and its candidates, the first one also the rest of the prompt. It
    emits the accepted candidates and one more token.
    """
    counters = RequestCounters()
    for i, chunk in enumerate(chunks):
        fed = rows[i] - (num_prompt if i == 0 else 1) if rows else len(chunk) - 1
        accepted = len(chunk) - 1
        judged = accepted + (fed > accepted)
        counters.answers += 1
        counters.misses += 1  # the token after the path is never in a chain that was fed whole
        counters.proposed += fed
        counters.accepted += accepted
        counters.verified += judged
        counters.path_lengths[accepted + 1] += 1
        counters.accepted_by_depth.update(range(1, accepted + 1))
        counters.judged_by_depth.update(range(1, judged + 1))
    return counters
