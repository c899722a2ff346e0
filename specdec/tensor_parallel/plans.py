"""Which layers of a family are cut how: transformers' own plans, and ours where it has none.

Styles are transformers' own words: ``colwise`` (a share of the outputs), ``rowwise`` (a share of
the inputs, summed), ``colwise_gather_output`` and ``rowwise_split_input`` (the same where every
rank needs all activations in between), ``replicated...`` (left whole).
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
    "h.*.attn.c_attn": GATHERED,  # queries, keys and values of all heads behind one another
    "h.*.attn.c_proj": SPLIT,
    "h.*.mlp.c_fc": COLUMN,
    "h.*.mlp.c_proj": ROW,
}
_OPT = {
    "decoder.layers.*.self_attn.q_proj": GATHERED,  # its attention counts heads by its config
    "decoder.layers.*.self_attn.k_proj": GATHERED,
    "decoder.layers.*.self_attn.v_proj": GATHERED,
    "decoder.layers.*.self_attn.out_proj": SPLIT,
    "decoder.layers.*.fc1": COLUMN,
    "decoder.layers.*.fc2": ROW,
}
_OWN: Mapping[str, Mapping[str, str]] = {"gpt2": _GPT2, "gpt_bigcode": _GPT2, "opt": _OPT}


def planned(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module, str]]:
    """(path, module, style) of every linear layer that is cut, the output head the last.

    Raises:
        UserError: for a family without a plan, or with a style that is not known here.
    """
    config = model.config.get_text_config()
    plan = getattr(config, "base_model_tp_plan", None) or _OWN.get(config.model_type)
    if not plan:
        raise UserError(
            f"model type {config.model_type!r} has no tensor-parallel plan in transformers, and"
            f" none here (those are {', '.join(sorted(_OWN))}): use degrees of 1 (null), or a"
            " pipeline (executor=pipeline)"
        )
    known = (COLUMN, ROW, GATHERED, SPLIT)
    wrong = sorted({s for s in plan.values() if s not in known and not s.startswith(_WHOLE)})
    if wrong:
        raise UserError(
            f"model type {config.model_type!r}: its tensor-parallel plan has styles that are not"
            f" supported ({', '.join(wrong)}): use degrees of 1 (null), or executor=pipeline"
        )
    patterns = [
        (re.compile(re.escape(name).replace(r"\*", r"\d+")), style)
        for name, style in plan.items()
        if style in known
    ]
    prefix = model.base_model_prefix
    for name, module in model.base_model.named_modules():
        for pattern, style in patterns:
            if pattern.fullmatch(name):
                yield f"{prefix}.{name}", module, style
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if module is head and isinstance(module, nn.Linear):
            yield name, module, GATHERED
