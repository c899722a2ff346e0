"""Measures transformers' own ``generate`` with the same models, prompts, stop rules and counters.

There are three kinds: ``hf_generate`` (plain), ``hf_assisted`` (draft model) and
``hf_prompt_lookup``. Hooks and a stopping criterion count passes and tokens, so that rates are
derived as for every other strategy.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation import StoppingCriteria, StoppingCriteriaList
from transformers.utils import logging as hf_logging

from specdec.errors import UserError
from specdec.metrics.results import RequestResult, RunTotals
from specdec.models.packing import num_bytes
from specdec.pairs import HuggingFacePair, ModelPair
from specdec.parts.fields import Count, Share, validated
from specdec.runs.runners import OneByOne, TokenPrompt, emit, result_of
from specdec.state import RequestState, StopRules


@validated
@dataclass(frozen=True, slots=True, kw_only=True)
class HFOptions:
    num_assistant_tokens: Count = 20  # maximum draft tokens per pass
    # How transformers adapts num_assistant_tokens after each pass.
    schedule: Literal["constant", "heuristic", "heuristic_transient"] = "constant"
    confidence_threshold: Share = 0.4  # the draft stops below this probability; 0 for never
    prompt_lookup_num_tokens: Count = 10
    max_matching_ngram: Count = 2


class PassLog:
    def __init__(self, model: torch.nn.Module, stack: ExitStack) -> None:
        self.rows: list[int] = []  # tokens fed per pass
        self.seconds = self._started = 0.0  # wall time, head included
        stack.callback(model.register_forward_pre_hook(self._before).remove)
        stack.callback(model.register_forward_hook(self._after, with_kwargs=True).remove)

    def _before(self, model: torch.nn.Module, args: Any) -> None:
        self._started = perf_counter()

    def _after(self, model: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self.seconds += perf_counter() - self._started
        tokens = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        self.rows.append(int(tokens.shape[1]))


class Emissions(StoppingCriteria):
    """Adds the tokens of each target pass to a request; ``sizes`` has their number per pass."""

    def __init__(self, request: RequestState, origin_s: float) -> None:
        self.sizes: list[int] = []
        self._request, self._origin_s = request, origin_s
        self._seen = request.num_prompt

    def __call__(self, input_ids: torch.Tensor, scores: Any, **unused: Any) -> torch.Tensor:
        at_s, tokens = perf_counter() - self._origin_s, input_ids[0, self._seen :].tolist()
        self.sizes.append(len(tokens))
        self._seen = input_ids.shape[1]
        emit(self._request, tokens, [at_s] * len(tokens))
        return torch.tensor([self._request.finished], device=input_ids.device)


@dataclass(kw_only=True, eq=False)
class HFBaseline(OneByOne):
    """One kind of transformers' own decoding on one model pair; hf_assisted needs the draft.

    The models have hooks and a neutral ``generation_config`` only during ``generate_one``. ``stop``
    is applied token by token. ``weight_bytes`` defaults to the models' sizes in memory.
    """

    kind: str  # hf_generate, hf_assisted or hf_prompt_lookup
    target: PreTrainedModel
    draft: PreTrainedModel | None = None
    options: HFOptions = HFOptions()

    runtime = "PyTorch"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.name = self.name or self.kind
        # Model and the settings that replace its checkpoint's, by name.
        self._models = {"target": (self.target, GenerationConfig())}
        if self.draft is not None:
            neutral = GenerationConfig(
                num_assistant_tokens=self.options.num_assistant_tokens,
                num_assistant_tokens_schedule=self.options.schedule,
                assistant_confidence_threshold=self.options.confidence_threshold,
            )
            self._models["draft"] = (self.draft, neutral)
        if not self.weight_bytes:
            self.weight_bytes = {k: num_bytes(model) for k, (model, _) in self._models.items()}
        sampling, eos = self.sampling, sorted(self.stop.eos_ids)
        names = () if sampling.greedy else ("temperature", "top_p", "top_k")
        settings = {name: getattr(sampling, name) for name in names}
        if sampling.no_repeat_ngram:
            settings["no_repeat_ngram_size"] = sampling.no_repeat_ngram
        if self.kind == "hf_prompt_lookup":
            settings["prompt_lookup_num_tokens"] = self.options.prompt_lookup_num_tokens
            settings["max_matching_ngram_size"] = self.options.max_matching_ngram
        self._config = GenerationConfig(
            max_new_tokens=self.stop.max_new_tokens,
            eos_token_id=eos or None,
            pad_token_id=eos[0] if eos else 0,
            do_sample=not sampling.greedy,
            use_cache=True,
            **settings,
        )

    def generate_one(self, prompt: TokenPrompt) -> tuple[RequestResult, RunTotals]:
        tokens, request = prompt.tokens, self.new_request(prompt)
        logs: dict[str, PassLog] = {}
        emissions = Emissions(request, self._origin_s)
        input_ids = torch.from_numpy(np.array(tokens, np.int64))[None].to(self.target.device)
        with ExitStack() as stack:
            stack.callback(hf_logging.set_verbosity, hf_logging.get_verbosity())
            hf_logging.set_verbosity_error()
            if not self.sampling.greedy:
                devices = [self.target.device] if self.target.device.type == "cuda" else []
                stack.enter_context(torch.random.fork_rng(devices=devices))
                torch.manual_seed(self.seed_of(prompt, np.uint64))
            for name, (model, config) in self._models.items():
                stack.callback(setattr, model, "generation_config", model.generation_config)
                model.generation_config = config
                logs[name] = PassLog(model, stack)
            stack.enter_context(torch.inference_mode())
            start = perf_counter()
            request.arrival_s = request.admitted_s = start - self._origin_s
            self.target.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                generation_config=self._config,
                logits_processor=LogitsProcessorList(self.sampling.processors),
                stopping_criteria=StoppingCriteriaList([emissions]),
                assistant_model=self.draft,
            )
            wall_s = perf_counter() - start
        fed, draft_rows = logs["target"].rows, logs["draft"].rows if "draft" in logs else []
        # A pass is fed the last token and its candidates, the first pass also the rest of the
        # prompt. It emits the accepted candidates and one more token.
        fed = [rows - (len(tokens) - 1) * (i == 0) for i, rows in enumerate(fed)]
        for size, rows in zip(emissions.sizes, fed, strict=True):
            proposed, accepted = rows - 1, size - 1
            request.counters.proposed += proposed
            # After the accepted path a chain has no further candidate, so no answer is a hit.
            judged = accepted + (proposed > accepted)
            request.counters.count_answer(accepted, judged, hit=False)
        model_s = {name: log.seconds for name, log in logs.items() if log.rows}
        totals = self.new_totals(
            len(fed),
            wall_s,
            # The prefill's last row yields a token as a tree node does; the others are prompt rows.
            prefill_rows=len(tokens) - 1,
            target_rows=sum(fed),
            draft_passes=len(draft_rows),
            draft_rows=sum(draft_rows),
            draft_total_s=model_s.get("draft", 0.0),
            model_s=model_s,
            model_calls={name: len(logs[name].rows) for name in model_s},
        )
        return result_of(request, self.tokenizer), totals


def baseline_of_transformers(
    cfg: Mapping[str, Any], pair: ModelPair, stop: StopRules
) -> HFBaseline:
    name, kind = cfg["strategy"]["name"], cfg["strategy"]["method"]
    if not isinstance(pair, HuggingFacePair):
        raise UserError(f"strategy={name} needs real models; use model=tiny or model=hf")
    draft = pair.draft if kind == "hf_assisted" else None
    options = HFOptions(**cfg["strategy"]["options"])
    return HFBaseline.of(
        cfg, pair, stop, kind=kind, target=pair.target, draft=draft, options=options
    )
