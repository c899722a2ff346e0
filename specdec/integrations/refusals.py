"""What a call of ``generate`` asks for and this library cannot do, refused before decoding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.stopping_criteria import MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer

from specdec.errors import UserError
from specdec.integrations.requests import Batch
from specdec.models.cache_argument import CACHE_ARGUMENTS

_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
_OTHER_MODES = (
    *("constraints", "force_words_ids", "prompt_lookup_num_tokens", "assistant_early_exit"),
    *("use_mtp", "penalty_alpha", "dola_layers"),
)
_PREPARED = (
    *("attention_mask", "position_ids", *CACHE_ARGUMENTS, "logits_to_keep", "use_cache"),
    "cache_position",
)
"""Arguments of the model that ``generate`` prepares itself."""


def check_call(
    model: PreTrainedModel,
    config: GenerationConfig,
    model_kwargs: Mapping[str, Any],
    *,
    synced_gpus: bool,
) -> None:
    """Checks the arguments of a call.

    Raises:
        UserError: naming the first that cannot be honoured.
    """
    if model.config.is_encoder_decoder:
        raise UserError(f"{type(model).__name__} has an encoder: only decoder-only models are run")
    if synced_gpus:
        raise UserError("synced_gpus=True is not possible: the model must be on one device")
    if (config.num_beams or 1) > 1:
        raise UserError(f"num_beams={config.num_beams} is not possible: strategies decode one beam")
    for name in _OUTPUTS:
        if getattr(config, name, None):
            raise UserError(
                f"{name}=True is not possible: values of single steps are not kept; leave it out"
            )
    for name in _OTHER_MODES:
        if getattr(config, name, None):
            raise UserError(
                f"{name}={getattr(config, name)!r:.60} chooses a mode of generate's own, which"
                " custom_generate replaces: leave one of them out"
            )
    if config.use_cache is False:
        raise UserError("use_cache=False is not possible: strategies decode with caches")
    if config.cache_implementation not in (None, "dynamic"):
        raise UserError(
            f"cache_implementation={config.cache_implementation!r} is not possible: strategies have"
            " caches of their own; leave it out"
        )
    for name in CACHE_ARGUMENTS:
        if getattr(model_kwargs.get(name), "_is_user_defined", False):
            raise UserError(f"{name} is not possible: each call fills caches of its own")
    for name, value in model_kwargs.items():
        if name not in _PREPARED and value is not None and value is not False:
            raise UserError(f"{name} is not possible: the model gets token ids and nothing else")


def padding_of(input_ids: Tensor, model_kwargs: Mapping[str, Any]) -> list[int]:
    """Number of padding tokens on the left of each row.

    Raises:
        UserError: a row without tokens, padding elsewhere, or positions that do not follow it.
    """
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


def check_batch(batch: Batch, max_positions: int | None, streamer: BaseStreamer | None) -> None:
    """Checks what depends on the number and the lengths of rows.

    Raises:
        UserError: a streamer for several rows, rows beyond the model's positions, or rows that end
            apart without an end token.
    """
    if streamer is not None and len(batch.padding) > 1:
        raise UserError(f"streamer takes one row, not {len(batch.padding)}: stream one prompt")
    longest = batch.max_length - min(batch.padding)
    if max_positions is not None and longest > max_positions:
        raise UserError(
            f"{longest} tokens (prompt and max_new_tokens) exceed the model's {max_positions}"
            " positions: shorten one of them"
        )
    others = [c for c in batch.criteria if not isinstance(c, MaxLengthCriteria)]
    if len(batch.padding) > 1 and others and not batch.eos_ids:
        raise UserError(
            "stopping_criteria may end the rows of a batch apart, which generate pads only with an"
            " end token: set eos_token_id, or decode one row per call"
        )
