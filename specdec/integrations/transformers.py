"""Strategies of this library in transformers' ``model.generate`` (docs/transformers.md).

    from specdec.integrations.transformers import generate

    model.generate(**inputs, custom_generate=generate, strategy="best_first", draft_model=small)

Logits processors are called once per tree node, stopping criteria once per emitted token, with the
sequence so far; they must depend on their arguments alone. Shape letters: B batch rows, T tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    PreTrainedModel,
    StoppingCriteriaList,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation import (
    GenerateDecoderOnlyOutput,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation.stopping_criteria import MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer

from specdec.config.job import run_job_of
from specdec.errors import UserError
from specdec.metrics import RequestResult, summarise
from specdec.models.slicing import CACHE_ARGUMENTS
from specdec.pairs import LoadedPair
from specdec.runs.runners import PartsRunner, TokenPrompt
from specdec.sampling.transform import SamplingParams
from specdec.state import DecodeState, RequestState, StopRules

_SECTIONS = ("source", "policy", "verifier", "executor", "serving", "prefill_chunk")
"""Keys of the configuration that ``overrides`` may change."""

_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
_OTHER_MODES = (
    *("constraints", "force_words_ids", "prompt_lookup_num_tokens", "assistant_early_exit"),
    *("use_mtp", "penalty_alpha", "dola_layers"),
)
_SETTINGS: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "num_beams": ((1,), "strategies decode one beam"),
    "use_cache": ((True,), "strategies decode with caches"),
    "cache_implementation": (("dynamic",), "strategies have caches of their own"),
    **dict.fromkeys(_OUTPUTS, ((False,), "values of single steps are not kept")),
    **dict.fromkeys(
        _OTHER_MODES, ((False, 0), "custom_generate replaces the modes of generate's own")
    ),
}
"""Maps a setting of generate to its allowed values besides None, and why others are refused."""

_PREPARED = (
    *("attention_mask", "position_ids", *CACHE_ARGUMENTS, "logits_to_keep", "use_cache"),
    "cache_position",
)
"""Arguments of the model that ``generate`` prepares itself."""

_WITH_MEMORY = (UnbatchedClassifierFreeGuidanceLogitsProcessor, SynthIDTextWatermarkLogitsProcessor)
_WARPERS = (
    (TopPLogitsWarper, "top_p", 0.0),
    (TopKLogitsWarper, "top_k", 0),
    (TemperatureLogitsWarper, "temperature", 1e-6),
)
"""Last processors of a list, last first: class, key of ``SamplingParams``, exclusive minimum."""


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """Result of ``generate`` with ``return_dict_in_generate=True``.

    Attributes:
        sequences: int64[B, T], prompts and new tokens, as without ``custom_generate``.
        origins: per row and new token the index of the source that drafted it; -1: the target.
        finish_reasons: "eos", "length" or "criteria" per row.
        metrics: metrics of the call (docs/metrics.md).
    """

    origins: tuple[tuple[int, ...], ...] | None = None
    finish_reasons: tuple[str, ...] | None = None
    metrics: dict[str, Any] | None = None


def generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    strategy: str = "speculative",
    draft_model: PreTrainedModel | None = None,
    eagle_head: str | Path | None = None,
    overrides: Sequence[str] = (),
    config_dirs: Sequence[str | Path] = (),
    exact: bool = False,
    seed: int | None = None,
    token_streamer: BaseStreamer | None = None,
    **model_kwargs: Any,
) -> Tensor | SpeculativeOutput:
    """Decodes with a strategy of this library; for ``custom_generate=`` of ``model.generate``.

    transformers prepares the arguments up to ``generation_config`` and does not pass on
    ``streamer`` and ``assistant_model``. Greedy tokens equal those of ``model.generate`` itself, up
    to ties within the rounding of the dtype (``exact`` removes these); sampled tokens have its
    distribution.

    Args:
        input_ids: int64[B, T], padded on the left.
        logits_processor: called per node of the tree; must depend on its arguments alone.
        stopping_criteria: called with one row, int64[1, T], after each token, and no scores.
        strategy: a preset of ``specdec list``.
        draft_model: a model with the target's tokenizer.
        eagle_head, exact: folder of an EAGLE head; whether rows have the bits of plain decoding.
        overrides: words such as "policy.gamma=4" for source, policy, verifier, executor or serving.
        config_dirs: further configuration trees (``--config-dir``).
        seed: seed of sampling; if None, it is taken from torch's global generator.
        token_streamer: receives the prompt and each new token; for one row only.
        model_kwargs: arguments that transformers prepares for the model; others are refused.

    Returns:
        int64[B, T'], shorter rows padded; a ``SpeculativeOutput`` with ``return_dict_in_generate``.
    """
    _check_call(model, generation_config, model_kwargs)
    batch = _Batch(
        input_ids,
        _padding_of(input_ids, model_kwargs),
        logits_processor,
        stopping_criteria,
        generation_config,
    )
    pair = LoadedPair(target=model, draft=draft_model, eagle_head=eagle_head, exact=exact)
    batch.check(pair.max_positions, token_streamer)
    config = _config(strategy, tuple(overrides), tuple(map(str, config_dirs)), pair.num_layers)
    if seed is None:
        seed = int(torch.randint(2**31, (1,))) if batch.samples else 0
    runner = PartsRunner(
        cfg=config | {"seed": seed, "batch_size": len(batch.padding)},
        pair=pair,
        stop=StopRules(max_new_tokens=1),  # unused: each request has its own
        on_step=None if token_streamer is None else _streaming(token_streamer),
        new_request=batch.request,
    )
    results: list[RequestResult] = []
    if token_streamer is not None:
        token_streamer.put(input_ids.cpu())
    try:
        totals = runner.run(batch.prompts(), results.append)
    finally:
        runner.close()
    if token_streamer is not None:
        token_streamer.end()
    rows = sorted(results, key=lambda result: result.id)
    sequences = batch.joined([row.output for row in rows])
    if not generation_config.return_dict_in_generate:
        return sequences
    return SpeculativeOutput(
        sequences=sequences,
        origins=tuple(row.origins for row in rows),
        finish_reasons=tuple(row.finish_reason for row in rows),
        metrics=summarise(rows, totals),
    )


@cache
def _config(
    strategy: str, overrides: tuple[str, ...], config_dirs: tuple[str, ...], num_layers: int
) -> dict[str, Any]:
    for word in overrides:
        if word.lstrip("+~").partition("=")[0].partition(".")[0] not in _SECTIONS:
            raise UserError(
                f"overrides={word!r} is not for generate: it takes keys of {', '.join(_SECTIONS)};"
                " give models, lengths and sampling as arguments of generate"
            )
    words = [f"strategy={strategy}", "model=random", f"model.num_layers={num_layers}", *overrides]
    config = run_job_of(words, [Path(folder) for folder in config_dirs]).config
    if config["strategy"]["kind"] != "parts":
        raise UserError(
            f"strategy={strategy} is decoding of another program: call its own generate, or compare"
            " it with `specdec compare`"
        )
    if config["executor"].get("transport") == "distributed":
        raise UserError(
            "executor.transport=distributed loads its own models from disk: use `specdec run`, or"
            " executor.transport=in_process"
        )
    return config


def _streaming(streamer: BaseStreamer) -> Callable[[DecodeState], None]:
    num_put = 0

    def put(state: DecodeState) -> None:
        nonlocal num_put
        for request in state.requests.values():
            for token in request.output[num_put:]:
                streamer.put(torch.tensor([token]))
            num_put = len(request.output)

    return put


class _Batch:
    """The rows of a call of ``generate``: ``input_ids`` int64[B, T], where row i has ``padding[i]``
    padding tokens on the left.
    """

    def __init__(
        self,
        input_ids: Tensor,
        padding: Sequence[int],
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
    ) -> None:
        for processor in processors:
            if isinstance(processor, _WITH_MEMORY):
                raise UserError(
                    f"{type(processor).__name__} remembers the tokens of earlier calls, which the"
                    " branches of a token tree do not share: leave it out"
                )
        lengths = [c.max_length for c in criteria if isinstance(c, MaxLengthCriteria)]
        self.input_ids, self.padding = input_ids, padding
        self.samples = bool(config.do_sample)
        self._processors, self._criteria = processors, criteria
        self._max_length = min(lengths, default=config.max_length)
        self._eos_ids = frozenset(_ids(config.eos_token_id))
        self._pad = next(iter(_ids(config._pad_token_tensor)), 0)

    def check(self, max_positions: int | None, streamer: BaseStreamer | None) -> None:
        if streamer is not None and len(self.padding) > 1:
            raise UserError(
                f"token_streamer takes one row, not {len(self.padding)}: stream one prompt"
            )
        longest = self._max_length - min(self.padding)
        if max_positions is not None and longest > max_positions:
            raise UserError(
                f"{longest} tokens (prompt and max_new_tokens) exceed the model's {max_positions}"
                " positions: shorten one of them"
            )
        others = [c for c in self._criteria if not isinstance(c, MaxLengthCriteria)]
        if len(self.padding) > 1 and others and not self._eos_ids:
            raise UserError(
                "stopping_criteria may end the rows of a batch apart, which generate pads only with"
                " an end token: set eos_token_id, or decode one row per call"
            )

    def prompts(self) -> list[TokenPrompt]:
        rows = zip(self.input_ids.cpu().numpy(), self.padding, strict=True)
        return [TokenPrompt(i, np.array(row[pad:], np.int64)) for i, (row, pad) in enumerate(rows)]

    def request(self, prompt: TokenPrompt, arrival_s: float) -> RequestState:
        row = self.input_ids[prompt.id]
        return RequestState(
            request_id=prompt.id,
            prompt=prompt.tokens,
            stop=_CriteriaStop(
                max_new_tokens=max(self._max_length - len(row), 1),
                eos_ids=self._eos_ids,
                criteria=self._criteria,
                row=row,
            ),
            sampling=self._sampling(prompt.id),
            arrival_s=arrival_s,
        )

    def _sampling(self, row: int) -> SamplingParams:
        """Translates a row's processors into fields of ``SamplingParams`` that mean the same."""
        left, keys = list(self._processors), {"temperature": float(self.samples)}
        for kind, name, bound in _WARPERS if self.samples else ():
            last = left[-1] if left else None
            value = getattr(last, name, bound)
            if type(last) is kind and value > bound and _plain(last):
                keys[name] = value
                left.pop()
        pad, num_rows = self.padding[row], len(self.padding)
        if left and type(left[0]) is NoRepeatNGramLogitsProcessor and not pad:
            keys["no_repeat_ngram"] = left.pop(0).ngram_size
        processors: list[Callable[[Any, Any], Any]] = list(left)
        if left and (pad or num_rows > 1):
            padding = self.input_ids[row, :pad]
            processors = [_InBatch(LogitsProcessorList(left), row, num_rows, padding)]
        return SamplingParams(**keys, processors=tuple(processors))  # type: ignore[arg-type]

    def joined(self, outputs: Sequence[Sequence[int]]) -> Tensor:
        longest, ids = max(map(len, outputs)), self.input_ids
        new = [[*output, *[self._pad] * (longest - len(output))] for output in outputs]
        return torch.cat([ids, torch.tensor(new, dtype=ids.dtype, device=ids.device)], dim=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _CriteriaStop(StopRules):
    """Stops if transformers' criteria do, which are called after every emitted token.

    Attributes:
        criteria: called with all tokens of the row, int64[1, T], padding included, and no scores.
        row: int64[T], padding and prompt.
    """

    criteria: StoppingCriteriaList
    row: Tensor

    def reason(self, output: Sequence[int]) -> str | None:
        """Returns "eos", "length" or "criteria"; None if the row is not complete."""
        new = torch.tensor(output, dtype=self.row.dtype, device=self.row.device)
        if not bool(torch.as_tensor(self.criteria(torch.cat([self.row, new])[None], None)).any()):
            return "length" if len(output) >= self.max_new_tokens else None
        if output[-1] in self.eos_ids:
            return "eos"
        return "length" if len(output) >= self.max_new_tokens else "criteria"


@dataclass(frozen=True, slots=True, eq=False)  # hashed by identity, as processors are
class _InBatch:
    """Applies the processors of a batch to one of its rows. Some store a value per row or count the
    padding, so they get a padded batch in which every row is this one.
    """

    processors: LogitsProcessorList
    row: int
    num_rows: int
    padding: Tensor

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        whole = torch.cat([self.padding[None], input_ids], dim=1).repeat(self.num_rows, 1)
        scored: Tensor = self.processors(whole, scores.repeat(self.num_rows, 1))
        return scored[self.row, None]


def _ids(value: int | Sequence[int] | Tensor | None) -> list[int]:
    return [] if value is None else [int(i) for i in torch.as_tensor(value).flatten().tolist()]


def _plain(warper: Any) -> bool:
    values = vars(warper)
    fills = values.get("filter_value", -float("inf"))
    return fills == -float("inf") and values.get("min_tokens_to_keep", 1) == 1


def _check_call(
    model: PreTrainedModel, config: GenerationConfig, model_kwargs: Mapping[str, Any]
) -> None:
    if model.config.is_encoder_decoder:
        raise UserError(f"{type(model).__name__} has an encoder: only decoder-only models are run")
    for name, (taken, reason) in _SETTINGS.items():
        if (value := vars(config).get(name)) not in (None, *taken):
            raise UserError(f"{name}={value!r:.60} is not possible: {reason}; leave it out")
    for name in CACHE_ARGUMENTS:
        if getattr(model_kwargs.get(name), "_is_user_defined", False):
            raise UserError(f"{name} is not possible: each call fills caches of its own")
    for name, value in model_kwargs.items():
        if name not in _PREPARED and value is not None and value is not False:
            raise UserError(f"{name} is not possible: the model gets token ids and nothing else")


def _padding_of(input_ids: Tensor, model_kwargs: Mapping[str, Any]) -> list[int]:
    num_rows, length = input_ids.shape
    mask = model_kwargs.get("attention_mask")
    seen = torch.ones_like(input_ids) if mask is None else (mask != 0).to(input_ids.dtype)
    padding = length - seen.sum(dim=1)
    columns = torch.arange(length, device=input_ids.device)
    if not torch.equal(seen, (columns >= padding[:, None]).to(seen.dtype)):
        raise UserError(
            "attention_mask masks tokens after the first token of a row: pad on the left"
            " (tokenizer.padding_side='left')"
        )
    if not length or int(padding.max()) == length:
        raise UserError("a row has no tokens: give each at least one (inputs_embeds is not taken)")
    positions = model_kwargs.get("position_ids")
    if positions is not None:
        expected = (columns - padding[:, None]).clamp(min=0)
        shown = torch.broadcast_to(positions, (num_rows, length))
        if not torch.equal(shown * seen, expected * seen):
            raise UserError("position_ids must count the tokens of each row from 0: leave it out")
    return [int(pad) for pad in padding]
