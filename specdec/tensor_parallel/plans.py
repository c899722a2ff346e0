"""Sharding plans of model families: those of transformers, and our own for families without one.

Styles have transformers' names: ``colwise`` (shards the outputs), ``rowwise`` (shards the inputs
and sums), ``colwise_gather_output`` and ``rowwise_split_input`` (the same, but every rank has all
activations between the layers), ``replicated...`` (not sharded). A plan's entry for the input
embeddings is ignored: they are replicated (``sharding``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from torch import nn
from transformers import PreTrainedModel

from specdec.errors import UserError

COLUMN, ROW = "colwise", "rowwise"
GATHERED, SPLIT = "colwise_gather_output", "rowwise_split_input"
_WHOLE = "replicated"

_GPT2 = {
    "h.*.attn.c_attn": GATHERED,  # queries, keys and values of all heads, concatenated
    "h.*.attn.c_proj": SPLIT,
    "h.*.mlp.c_fc": COLUMN,
    "h.*.mlp.c_proj": ROW,
}
_OPT = {
    "decoder.layers.*.self_attn.q_proj": GATHERED,  # attention needs all heads
    "decoder.layers.*.self_attn.k_proj": GATHERED,
    "decoder.layers.*.self_attn.v_proj": GATHERED,
    "decoder.layers.*.self_attn.out_proj": SPLIT,
    "decoder.layers.*.fc1": COLUMN,
    "decoder.layers.*.fc2": ROW,
}
_OWN: Mapping[str, Mapping[str, str]] = {"gpt2": _GPT2, "gpt_bigcode": _GPT2, "opt": _OPT}


def planned(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module, str]]:
    """Yields (path, module, style) of every linear layer to shard; the output head is last."""
    config = model.config.get_text_config()
    embedding = model.get_input_embeddings()
    embeddings = {name for name, m in model.base_model.named_modules() if m is embedding}
    given = getattr(config, "base_model_tp_plan", None) or {}
    layers = {path: style for path, style in given.items() if path not in embeddings}
    plan: Mapping[str, str] = layers or _OWN.get(config.model_type, {})
    if not plan:
        raise UserError(
            f"model type {config.model_type!r} has no tensor-parallel plan in transformers or"
            f" specdec (which adds {', '.join(sorted(_OWN))}): use degrees of 1 (null), or a"
            " pipeline (executor=pipeline)"
        )
    known = (COLUMN, ROW, GATHERED, SPLIT)
    wrong = sorted({s for s in plan.values() if s not in known and not s.startswith(_WHOLE)})
    if wrong:
        raise UserError(
            f"model type {config.model_type!r}: its tensor-parallel plan has styles that are not"
            f" supported ({', '.join(wrong)}): use degrees of 1 (null), or executor=pipeline"
        )
    for name, module in model.base_model.named_modules():
        style = plan.get(re.sub(r"(?<=\.)\d+(?=\.)", "*", name))
        if style in known:
            yield f"{model.base_model_prefix}.{name}", module, style
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if module is head and isinstance(module, nn.Linear):
            yield name, module, GATHERED
