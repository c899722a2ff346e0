"""Counts an EAGLE head's accepted drafts under the interpretations of its files that loaders use.

An interpretation is called a *reading*. If the reading of a loader (vLLM, SGLang, ...) differs from
that in training, decoding stays lossless, but fewer drafts are accepted, without any error.

Shape letters: S tokens of a text, A drafts.
"""

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from specdec.metrics.loops import repeated_ngrams
from specdec.models.config_values import config_value
from specdec.models.eagle import EagleConfig, EagleHead
from specdec.models.eagle_loading import HeadFiles, load_head
from specdec.models.eagle_unroll import unroll
from specdec.models.frozen import FrozenModel

AS_ON_DISK = "as on disk"
_LAYERS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    config: EagleConfig
    name: str = AS_ON_DISK  # what is read otherwise than the folder says
    read_by: str = ""  # software that reads heads in this way; "" if unknown
    normed: bool = True  # whether version 1 reads the target's last state after its final norm
    remedy: str = ""  # entries of config.json that state this reading; "" if there are none


def readings(files: HeadFiles, frozen: FrozenModel) -> list[Reading]:
    """Returns the reading that the files state, then others that differ from it in one aspect."""
    config = files.head_config(frozen.config)
    found = [Reading(config=config)]

    def add(
        name: str, read_by: str = "", remedy: Any = None, normed: bool = True, **to: Any
    ) -> None:
        text = "" if remedy is None else json.dumps(remedy)[1:-1]
        other = replace(config, **to)
        found.append(Reading(config=other, name=name, read_by=read_by, remedy=text, normed=normed))

    if config.version == 1:
        add("state before the target's final norm", normed=False)
    else:
        shifted = {shift: tuple(layer + shift for layer in config.layers) for shift in (1, -1)}
        others = [("layer ids +1", "SGLang, with explicit ids", shifted[1])]
        others += [("layer ids -1", "ids taken for outputs", shifted[-1])]
        others += [("layers from high to low", "", config.layers[::-1])]
        for name, read_by, layers in others:
            if layers != config.layers and 0 <= min(layers) <= max(layers) < frozen.num_layers:
                add(name, read_by, {_LAYERS: [layer + 1 for layer in layers]}, layers=layers)
        before, fed = config.norm_before_residual, config.norm_output
        by = "SafeAILab, SGLang" if before else "vLLM, without the flag"
        to = {"norm_before_residual": not before}
        add(f"residual {'before' if before else 'after'} its norm", by, to, **to)
        by, to = "SpecForge's trainer", {"norm_output": not fed}
        by = by if fed else "loaders of EAGLE-3.1, given the flag"
        add(f"fed back {'before' if fed else 'after'} the norm", by, to, **to)
    if config.fc_norm:
        add("without fc_norm", fc_norm=False)
    if config.norm_before_fc:
        add("without input_norm", norm_before_fc=False)
    if config.fc_bias:
        add("without fc.bias", "vLLM 0.32", fc_bias=False)
    if config.own_embedding and config.layer.hidden_size == config.target_hidden_size:
        add("the target's embedding", own_embedding=False)
    own = config.layer.to_dict()
    target = dict(config_value(frozen.config, "rope_parameters", {}))
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    without = "config.json without rope entries"
    for rope, name, by in (
        (target, "the target's rope", "vLLM, SSD"),
        (plain, "unscaled rope of theta 10000", without),
    ):
        if rope != own["rope_parameters"] and "rope_theta" in rope:
            changed = {"rope_parameters": rope}
            add(name, by, changed, layer=LlamaConfig(**{**own, **changed}))
    return found


def load_reading(files: HeadFiles, reading: Reading, frozen: FrozenModel) -> EagleHead:
    config, model, kept = reading.config, frozen.model, copy.copy(files)
    used = {"fc_norm.": config.fc_norm, "input_norm.": config.norm_before_fc}
    used |= {"fc.bias": config.fc_bias, "embed_tokens.": config.own_embedding}
    left_out = tuple(name for name, is_used in used.items() if not is_used)
    kept.tensors = {n: t for n, t in files.tensors.items() if not n.startswith(left_out)}
    output = None if config.own_output else model.get_output_embeddings()
    return load_head(kept, config, embedding=model.get_input_embeddings().weight, output=output)


@torch.no_grad()
def accepted(
    frozen: FrozenModel,
    head: EagleHead,
    texts: Sequence[tuple[Tensor, int]],
    num_tokens: int,
    *,
    normed: bool = True,
) -> list[Tensor]:
    """Drafts ``num_tokens`` greedy tokens at each position of the target's answers, except in
    repeated n-grams. ``texts`` has pairs: tokens int64[S] of prompt and answer, prompt length.
    ``normed`` is as in ``Reading``. Returns int64[A] per text: how many leading tokens of each
    draft equal the answer's.
    """
    found, dtype = [], frozen.model.get_input_embeddings().weight.dtype
    layers = [layer + 1 for layer in head.config.layers]
    for tokens, prompt in texts:
        last = len(tokens) - 1 - num_tokens  # rows whose K tokens all are in the text
        first = max(0, prompt - 2)  # the row that predicts the first new token
        outside = ~torch.from_numpy(repeated_ngrams(tokens[prompt:].tolist()))
        rows = torch.arange(first, max(first, last))
        rows = rows[outside[first + 2 - prompt :][: len(rows)]]
        run = torch.zeros(len(rows), dtype=torch.long)
        found.append(run)
        if not len(rows):
            continue
        streams = frozen.residuals(tokens[None].to(frozen.device), {*layers})
        parts: list[Any] = [streams[layer] for layer in layers]
        if head.config.version == 1 and normed:
            parts = [frozen.norm(part) for part in parts]
        features = torch.cat(parts, -1).to(dtype)
        for step, outputs in enumerate(unroll(head, tokens[None], features, num_tokens, rows)):
            kept = outputs[0, rows] if step == 0 else outputs[0]
            drafted = head.target_logits(head.logits(kept)).argmax(-1).cpu()
            run += (run == step) & (drafted == tokens[rows + 2 + step])
    return found
