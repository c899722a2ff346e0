"""Shards a model: replaces the linear layers of transformers' modules by one rank's shares.

All other code is transformers', on smaller matrices; attention derives its number of heads from the
projections' outputs. Embeddings are replicated. A sharding plan has a style per layer; it is that
of transformers or, for some model types without one, of this module. The styles are ``colwise``
(shards the outputs), ``rowwise`` (shards the inputs and sums), ``colwise_gather_output`` and
``rowwise_split_input`` (the same, but every rank gets all outputs, or is given all inputs),
``replicated...`` (not sharded).
"""

import re
from collections.abc import Iterator, Mapping

from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.errors import UserError
from specdec.tensor_parallel.collective import Collective
from specdec.tensor_parallel.cuts import Cut, HeadSplit, Piece, even
from specdec.tensor_parallel.layers import ColumnLinear, RowLinear

_KEY_VALUE = ("k_proj", "v_proj")
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


def shard_modules(model: PreTrainedModel, group: Collective) -> dict[str, Cut]:
    """Replaces a model's linear layers in place by shares with weights on the meta device.

    Returns the ``Cut`` of each sharded parameter by name; the caller must assign the weights.
    """
    cuts: dict[str, Cut] = {}
    for path, module, style in list(planned(model)):
        weight = module.weight
        assert isinstance(weight, Tensor), f"{path} has no weight"
        transposed = not isinstance(module, nn.Linear)  # GPT-2's Conv1D: [inputs, outputs]
        outputs, inputs = weight.T.shape if transposed else weight.shape
        share: ColumnLinear | RowLinear
        if style in (COLUMN, GATHERED):
            pieces = _pieces(model, path, outputs, style, group)
            own = {"weight": Cut(int(transposed), pieces), "bias": Cut(0, pieces)}
            share = ColumnLinear(module, own)
            share.gathered = (group, outputs) if style == GATHERED else None
        else:
            pieces = _pieces(model, path, inputs, style, group)
            own = {"weight": Cut(int(not transposed), pieces)}
            share = RowLinear(module, own)
            share.group, share.split = group, pieces[0] if style == SPLIT else None
        cuts |= {f"{path}.{n}": cut for n, cut in own.items() if getattr(module, n) is not None}
        model.set_submodule(path, share)
    return cuts


def _pieces(
    model: PreTrainedModel, path: str, total: int, style: str, group: Collective
) -> tuple[Piece, ...]:
    if style in (COLUMN, ROW) and ("attn" in path or "attention" in path):
        config = model.config.get_text_config()
        num_heads = int(config.num_attention_heads)
        num_kv_heads = int(getattr(config, "num_key_value_heads", None) or num_heads)
        heads = HeadSplit.of(num_heads, num_kv_heads, rank=group.rank, size=group.size)
        parent = model.get_submodule(path.rpartition(".")[0])
        if hasattr(parent, "num_key_value_groups"):
            parent.num_key_value_groups = heads.group_size
        if path.endswith(_KEY_VALUE):
            return tuple(piece.times(total // num_kv_heads) for piece in heads.key_value)
        return tuple(piece.times(total // num_heads) for piece in heads.query)
    return (even(total, rank=group.rank, size=group.size),)


def planned(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module, str]]:
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
