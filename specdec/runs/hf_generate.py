"""transformers' own ``generate`` as rows of our tables: same models, prompts, rules and counters.

Three kinds: ``hf_generate`` (plain), ``hf_assisted`` (draft model) and ``hf_prompt_lookup``. Hooks
and a streamer count passes and tokens, so rates are derived as for every other strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
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
from specdec.runs.hf_counting import EmissionLog, PassLog, stop_criterion
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


@dataclass(kw_only=True, eq=False)
class HFBaseline:
    """One kind of baseline on one model pair, as a ``Runner``; prompts are decoded one by one.

    Hooks and a neutral ``generation_config`` are on the models during ``generate_one`` only.

    Attributes:
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

    kind: str
    target: PreTrainedModel
    stop: StopRules
    sampling: SamplingParams
    seed: int = 0
    draft: PreTrainedModel | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    options: HFOptions = HFOptions()
    name: str = ""
    weight_bytes: tuple[int, int] = (0, 0)

    parts = None
    trace = None

    def __post_init__(self) -> None:
        if self.kind not in HF_KINDS:
            raise ValueError(f"{self.kind!r} is unknown: use one of {', '.join(HF_KINDS)}")
        if (self.draft is not None) != (self.kind == "hf_assisted"):
            needs = "needs" if self.kind == "hf_assisted" else "has no use for"
            raise ValueError(f"{self.kind} {needs} a draft model")
        self.name = self.name or self.kind
        self.claims = Lossless.TOKEN if self.sampling.greedy else Lossless.DISTRIBUTION
        self._models = {"target": self.target}
        if self.draft is not None:
            self._models["draft"] = self.draft
        if not any(self.weight_bytes):
            target_bytes, *draft_bytes = map(num_bytes, self._models.values())
            self.weight_bytes = target_bytes, sum(draft_bytes)
        self._config = self._generation_config()
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
        logs, emissions = {name: PassLog() for name in ("target", "draft")}, EmissionLog()
        input_ids = torch.from_numpy(np.array(tokens, np.int64))[None].to(self.target.device)
        arguments: dict[str, Any] = {
            "attention_mask": torch.ones_like(input_ids),
            "generation_config": self._config,
            "logits_processor": LogitsProcessorList(self.sampling.processors),
            "streamer": emissions,
        }
        if self.draft is not None:
            arguments["assistant_model"] = self.draft
        if self.stop.stop_strings:
            criterion: Any = stop_criterion(self.stop, len(tokens))
            arguments["stopping_criteria"] = StoppingCriteriaList([criterion])
        with ExitStack() as stack:
            stack.callback(hf_logging.set_verbosity, hf_logging.get_verbosity())
            hf_logging.set_verbosity_error()
            self._seed_generator(prompt_id, stack)
            for name, model in self._models.items():
                stack.callback(setattr, model, "generation_config", model.generation_config)
                model.generation_config = self._neutral_config(name)
                stack.enter_context(logs[name].watching(model))
            stack.enter_context(torch.inference_mode())
            start = perf_counter()
            self.target.generate(input_ids, **arguments)
            wall_s = perf_counter() - start
        totals = self._totals(logs, emissions, len(tokens), wall_s)
        return self._result(prompt_id, len(tokens), start, logs["target"], emissions), totals

    def _generation_config(self) -> GenerationConfig:
        sampling, eos = self.sampling, sorted(self.stop.eos_ids)
        settings: dict[str, Any] = {
            "max_new_tokens": self.stop.max_new_tokens,
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
            settings["prompt_lookup_num_tokens"] = self.options.prompt_lookup_num_tokens
            settings["max_matching_ngram_size"] = self.options.max_matching_ngram
        return GenerationConfig(**settings)

    def _neutral_config(self, name: str) -> GenerationConfig:
        """In place of the checkpoint's: nothing for the target, the options for the draft."""
        options = self.options
        if name == "target":
            return GenerationConfig()
        return GenerationConfig(
            num_assistant_tokens=options.num_assistant_tokens,
            num_assistant_tokens_schedule=options.schedule,
            assistant_confidence_threshold=options.confidence_threshold,
        )

    def _seed_generator(self, prompt_id: int, stack: ExitStack) -> None:
        """Seeds the global generator for one prompt; ``stack`` restores it."""
        if self.sampling.greedy:
            return
        devices = [self.target.device] if self.target.device.type == "cuda" else []
        stack.enter_context(torch.random.fork_rng(devices=devices))
        state = np.random.SeedSequence([self.seed, prompt_id]).generate_state(1, np.uint64)
        torch.manual_seed(int(state[0]))

    def _totals(
        self, logs: Mapping[str, PassLog], emissions: EmissionLog, num_prompt: int, wall_s: float
    ) -> RunTotals:
        target, draft, passes = logs["target"], logs["draft"], len(emissions.chunks)
        assert len(target.rows) == passes, (
            f"{self.kind}: {len(target.rows)} target passes, {passes} emissions"
        )
        logs = {name: log for name, log in logs.items() if log.rows}
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
            target_bytes=self.weight_bytes[0],
            draft_bytes=self.weight_bytes[1],
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
        text = "" if self.tokenizer is None else str(self.tokenizer.decode(output))
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
            reason = self.stop.reason(decided[:length])
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
