"""Readings of one EAGLE head that loaders disagree on, and the acceptance that each gives.

A head that is read otherwise than it was trained stays lossless and only accepts less, so nothing
else reveals the error.

Shape letters: B = 1 sequence, S tokens, A drafts (one per position), K draft tokens, F size of a
feature.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from specdec.metrics.loops import repeated_ngrams
from specdec.models.config_values import config_value
from specdec.models.eagle import EagleConfig, EagleHead
from specdec.models.eagle_loading import HeadFiles, load_head
from specdec.models.eagle_unroll import unroll
from specdec.models.frozen import FrozenModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One way to read a head.

    Attributes:
        name: what is read otherwise than the folder says; "as on disk" for the folder's own.
        read_by: software that reads heads in this way; "" if unknown.
        normed: whether version 1 reads the target's last state after its final norm.
        remedy: entries of config.json that state this reading; "" if there are none.
    """

    name: str
    config: EagleConfig
    read_by: str = ""
    normed: bool = True
    remedy: str = ""


AS_ON_DISK = "as on disk"


def readings(files: HeadFiles, frozen: FrozenModel) -> list[Reading]:
    """Returns the folder's own reading, then each that differs from it in one aspect."""
    config = files.head_config(frozen.config)
    own = Reading(name=AS_ON_DISK, config=config)
    features = _of_features(config, frozen.num_layers)
    return [own, *features, *_of_flags(config), *_of_rope(config, frozen)]


def _of_features(config: EagleConfig, num_layers: int) -> Iterator[Reading]:
    if config.version == 1:
        name = "state before the target's final norm"
        yield Reading(name=name, config=config, normed=False)
        return
    key = "eagle_aux_hidden_state_layer_ids"
    for shift, read_by in ((1, "SGLang, with explicit ids"), (-1, "ids taken for outputs")):
        layers = tuple(layer + shift for layer in config.layers)
        if min(layers) >= 0 and max(layers) < num_layers:
            yield Reading(
                name=f"layer ids {shift:+d}",
                config=replace(config, layers=layers),
                read_by=read_by,
                remedy=f'"{key}": {[layer + 1 for layer in layers]}',
            )
    turned = tuple(reversed(config.layers))
    if turned != config.layers:
        yield Reading(
            name="layers from high to low",
            config=replace(config, layers=turned),
            remedy=f'"{key}": {[layer + 1 for layer in turned]}',
        )


def _of_flags(config: EagleConfig) -> Iterator[Reading]:
    if config.version == 3:
        normed, back = config.norm_before_residual, config.norm_output
        yield Reading(
            name=f"residual {'before' if normed else 'after'} its norm",
            config=replace(config, norm_before_residual=not normed),
            read_by="SafeAILab, SGLang" if normed else "vLLM, without the flag",
            remedy=f'"norm_before_residual": {str(not normed).lower()}',
        )
        yield Reading(
            name=f"fed back {'before' if back else 'after'} the norm",
            config=replace(config, norm_output=not back),
            read_by="SpecForge's trainer" if back else "loaders of EAGLE-3.1, given the flag",
            remedy=f'"norm_output": {str(not back).lower()}',
        )
    if config.fc_norm:
        yield Reading(name="without fc_norm", config=replace(config, fc_norm=False))
    if config.norm_before_fc:
        yield Reading(name="without input_norm", config=replace(config, norm_before_fc=False))
    if config.fc_bias:
        yield Reading(
            name="without fc.bias", config=replace(config, fc_bias=False), read_by="vLLM 0.32"
        )
    if config.own_embedding and config.hidden_size == config.target_hidden_size:
        yield Reading(name="the target's embedding", config=replace(config, own_embedding=False))


def _of_rope(config: EagleConfig, frozen: FrozenModel) -> Iterator[Reading]:
    target = dict(config_value(frozen.config, "rope_parameters", {}))
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    for rope, name, read_by in (
        (target, "the target's rope", "vLLM, SSD"),
        (plain, "unscaled rope of theta 10000", "config.json without rope entries"),
    ):
        if rope and rope != dict(config.rope) and "rope_theta" in rope:
            yield Reading(
                name=name,
                config=replace(config, rope=rope),
                read_by=read_by,
                remedy=f'"rope_parameters": {rope}'.replace("'", '"'),
            )


def load_reading(files: HeadFiles, reading: Reading, frozen: FrozenModel) -> EagleHead:
    """Loads the head under a reading; weights that it does not use are left out."""
    config, model, kept = reading.config, frozen.model, copy.copy(files)
    left_out = [] if config.fc_norm else ["fc_norm."]
    left_out += [] if config.norm_before_fc else ["input_norm."]
    left_out += [] if config.fc_bias else ["fc.bias"]
    left_out += [] if config.own_embedding else ["embed_tokens."]
    kept.shapes = {n: s for n, s in files.shapes.items() if not n.startswith(tuple(left_out))}
    output = None if config.own_output else model.get_output_embeddings()
    embedding = model.get_input_embeddings().weight
    return load_head(kept, config, embedding=embedding, output=output)


@dataclass(slots=True)
class Accepted:
    """Counts of drafts of K tokens, one after every position of a text outside repetition loops.

    ``lengths[i]`` is the number of drafts whose first i tokens were right, but no more; ``by_text``
    has the accepted tokens of each text.
    """

    drafts: int
    lengths: list[int]
    by_text: list[int]

    @property
    def mean(self) -> float:
        """Returns accepted tokens per draft."""
        return sum(k * n for k, n in enumerate(self.lengths)) / max(1, self.drafts)

    @property
    def by_position(self) -> list[float]:
        """Returns how often each draft token is right, given that those before it are."""
        reached = [sum(self.lengths[k:]) for k in range(len(self.lengths))]
        return [right / max(1, before) for before, right in pairwise(reached)]


@torch.no_grad()
def accepted(
    frozen: FrozenModel,
    head: EagleHead,
    texts: Sequence[tuple[Tensor, int]],
    num_tokens: int,
    *,
    normed: bool = True,
) -> Accepted:
    """Compares drafts of the ``num_tokens`` likeliest tokens with the target's own texts.

    ``texts`` are tokens, int64[S], with the number of those that are the prompt.
    """
    lengths, by_text = torch.zeros(num_tokens + 1, dtype=torch.long), []
    for tokens, prompt in texts:
        last = len(tokens) - 1 - num_tokens  # rows whose K tokens all are in the text
        first = max(0, prompt - 2)  # the row that predicts the first new token
        if last <= first:
            continue
        outside = ~torch.from_numpy(repeated_ngrams(tokens[prompt:].tolist()))
        rows = torch.arange(first, last)[outside[first + 2 - prompt : last + 2 - prompt]]
        if not len(rows):
            continue
        features = _features(frozen, head.config, tokens[None], normed)
        right = torch.ones(len(rows), dtype=torch.bool)
        run = torch.zeros(len(rows), dtype=torch.long)
        for step, outputs in enumerate(unroll(head, tokens[None], features, num_tokens, rows)):
            kept = outputs[0, rows] if step == 0 else outputs[0]
            drafted = head.target_logits(head.logits(kept)).argmax(-1)
            right &= (drafted == tokens[rows + 2 + step].to(drafted.device)).cpu()
            run += right
        lengths += torch.bincount(run, minlength=num_tokens + 1)
        by_text.append(int(run.sum()))
    return Accepted(int(lengths.sum()), lengths.tolist(), by_text)


def _features(frozen: FrozenModel, config: EagleConfig, tokens: Tensor, normed: bool) -> Tensor:
    """Returns the target's hidden states that the head reads, [1, S, F]."""
    tokens = tokens.to(frozen.device)
    streams = frozen.residuals(tokens, {layer + 1 for layer in config.layers})
    parts: list[Any] = [streams[layer + 1] for layer in config.layers]
    if config.version == 1 and normed:
        parts = [frozen.norm(part) for part in parts]
    dtype = frozen.model.get_input_embeddings().weight.dtype
    return torch.cat(parts, -1).to(dtype)
