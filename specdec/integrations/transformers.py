"""Strategies of this library in transformers' ``model.generate`` (docs/transformers.md).

from specdec.integrations.transformers import generate

model.generate(**inputs, custom_generate=generate, strategy="best_first", draft_model=small)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from specdec.config.job import run_job_of
from specdec.errors import UserError
from specdec.integrations.refusals import check_batch, check_call, padding_of
from specdec.integrations.requests import Batch
from specdec.metrics import RequestResult, summarise
from specdec.pairs import LoadedPair
from specdec.runs.runners import PartsRunner
from specdec.state import DecodeState, StopRules

_SECTIONS = ("source", "policy", "verifier", "executor", "serving", "prefill_chunk")
"""Keys of the configuration that ``overrides`` may change."""


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """Result with ``return_dict_in_generate=True``.

    Attributes:
        sequences: int64[B, T], prompts and new tokens, as without ``custom_generate``.
        origins: per row and new token the index of the source that proposed it; -1 for none.
        finish_reasons: per row eos, length or criteria.
        metrics: metrics of the call, by the names of docs/metrics.md.
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
    synced_gpus: bool = False,
    streamer: BaseStreamer | None = None,
    strategy: str = "speculative",
    draft_model: PreTrainedModel | None = None,
    eagle_head: str | Path | None = None,
    overrides: Sequence[str] = (),
    config_dirs: Sequence[str | Path] = (),
    exact: bool = False,
    seed: int | None = None,
    **model_kwargs: Any,
) -> Tensor | SpeculativeOutput:
    """Decodes with a strategy of this library; for ``custom_generate=`` of ``model.generate``.

    transformers prepares the arguments up to ``streamer``; the others are given to
    ``model.generate``. Greedy tokens are those without it, up to ties within the rounding of the
    dtype (``exact`` removes these); sampled ones have its distribution.

    Args:
        model: the target.
        input_ids: int64[B, T], padded on the left.
        logits_processor: functions of their arguments alone; called per node of the tree.
        stopping_criteria: called with one row, int64[1, T], after each token, and no scores.
        generation_config, synced_gpus: as prepared by ``model.generate``.
        streamer: receives each new token of one row.
        strategy: a preset of ``specdec list``.
        draft_model: with the target's tokenizer; ``assistant_model`` of ``generate`` if omitted.
        eagle_head, exact: see ``LoadedPair``.
        overrides: of source, policy, verifier, executor and serving, as on the command line.
        config_dirs: further configuration trees (``--config-dir``).
        seed: of the draws; None: drawn from torch's global generator if tokens are sampled.
        model_kwargs: what else transformers prepares; what has an effect here is refused.

    Returns:
        int64[B, T'], shorter rows padded; a ``SpeculativeOutput`` with ``return_dict_in_generate``.

    Raises:
        UserError: an argument that cannot be honoured, or a strategy that does not fit.
    """
    caller = _arguments_of_caller()
    streamer = streamer or caller.get("streamer")
    draft_model = _one_draft(draft_model, caller.get("assistant_model"))
    synced_gpus = bool(synced_gpus or caller.get("synced_gpus"))
    check_call(model, generation_config, model_kwargs, synced_gpus=synced_gpus)
    padding = padding_of(input_ids, model_kwargs)
    batch = Batch.of(input_ids, padding, logits_processor, stopping_criteria, generation_config)
    pair = LoadedPair(target=model, draft=draft_model, eagle_head=eagle_head, exact=exact)
    check_batch(batch, pair.max_positions, streamer)
    config = _config(strategy, tuple(overrides), tuple(map(str, config_dirs)), pair.num_layers)
    if seed is None:
        seed = int(torch.randint(2**31, (1,))) if batch.samples else 0
    config = config | {"seed": seed, "batch_size": len(padding)}
    output = _decoded(config, pair, batch, streamer)
    return output if generation_config.return_dict_in_generate else output.sequences


def _decoded(
    config: Mapping[str, Any], pair: LoadedPair, batch: Batch, streamer: BaseStreamer | None
) -> SpeculativeOutput:
    """The rows in their order, and the metrics of all."""
    runner = PartsRunner(
        cfg=config,
        pair=pair,
        stop=StopRules(max_new_tokens=1),  # of no request: each has its own
        on_step=None if streamer is None else _streaming(streamer),
        new_request=batch.request,
    )
    results: list[RequestResult] = []
    try:
        totals = runner.run(batch.prompts(), results.append)
    finally:
        runner.close()
    if streamer is not None:
        streamer.end()
    rows = sorted(results, key=lambda result: result.id)
    return SpeculativeOutput(
        sequences=_joined(batch.input_ids, [r.output for r in rows], batch.pad),
        origins=tuple(r.origins for r in rows),
        finish_reasons=tuple(r.finish_reason for r in rows),
        metrics=summarise(rows, totals),
    )


def _arguments_of_caller() -> Mapping[str, Any]:
    """Arguments of the ``model.generate`` that called ``generate``.

    transformers (5.23) does not give ``streamer``, ``assistant_model`` and ``synced_gpus`` to a
    callable, and says nothing: a streamer would receive the prompt and no end.
    """
    frame = inspect.currentframe()
    for _ in range(2):
        frame = None if frame is None else frame.f_back
    code = inspect.unwrap(GenerationMixin.generate).__code__
    return frame.f_locals if frame is not None and frame.f_code is code else {}


def _one_draft(
    draft_model: PreTrainedModel | None, assistant_model: PreTrainedModel | None
) -> PreTrainedModel | None:
    if draft_model is not None and assistant_model is not None:
        raise UserError("draft_model and assistant_model name the same thing: pass one of them")
    return draft_model if assistant_model is None else assistant_model


@cache
def _config(
    strategy: str, overrides: tuple[str, ...], config_dirs: tuple[str, ...], num_layers: int
) -> dict[str, Any]:
    """The checked configuration of a strategy for a target of that many layers."""
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
    """Puts new tokens into the streamer after each step, one by one as ``generate`` does."""
    num_put = 0

    def put(state: DecodeState) -> None:
        nonlocal num_put
        for request in state.requests.values():
            for token in request.output[num_put:]:
                streamer.put(torch.tensor([token]))
            num_put = len(request.output)

    return put


def _joined(input_ids: Tensor, outputs: Sequence[Sequence[int]], pad: int) -> Tensor:
    """int64[B, T']: the rows with their new tokens, padded on the right."""
    longest = max(map(len, outputs))
    new = [[*output, *[pad] * (longest - len(output))] for output in outputs]
    added = torch.tensor(new, dtype=input_ids.dtype, device=input_ids.device)
    return torch.cat([input_ids, added], dim=1)
