"""Heads that draft from the target's hidden states: EAGLE-1, EAGLE-3 and EAGLE-3.1.

A head is a small decoder. Its row for the token at position p reads that token's embedding and the
*state* of position p - 1, and predicts the token at p + 1. Where the target has not yet computed
position p - 1, the state is the head's own output for that position, which is fed back.

EAGLE (arXiv 2401.15077, section 3.2; EAGLE-2 uses the same weights): the state is the target's last
hidden state after its final norm; ``fc`` reads [embedding; state], and one Llama layer without its
first norm follows; the target's output matrix gives the logits.

EAGLE-3 (arXiv 2503.01840, section 3.1): the state is ``fc`` of three residual streams of the
target; the first layer's queries, keys and values read [norm(embedding); norm(state)]; a norm and
an output matrix of the head give logits over a draft vocabulary. EAGLE-3.1 (arXiv 2605.09992) adds
a norm per stream (``fc_norm``) and feeds the output back after the head's norm (``norm_output``).

Shape letters: B sequences, T tokens, E hidden size of the head, S size of a feature (streams of the
target, concatenated), V vocabulary, U draft vocabulary, H query heads, G key/value heads, D head
size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from specdec.errors import UserError
from specdec.models.exits import spread
from specdec.types import HiddenName

Attend: TypeAlias = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Attention function (layer index, query [B, H, T, D], key, value [B, G, T, D]) -> [B, T, H, D]."""


ATTENTION = "specdec_heads"
"""Name under which ``_attend`` is registered in transformers, for the layers of draft heads."""


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, _mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """Calls ``options["attend"]``; UserError for a sliding window, a soft cap or another scale."""
    scaled = options.get("scaling") in (None, query.shape[-1] ** -0.5)
    other = [k for k in ("sliding_window", "softcap", "s_aux") if options.get(k) is not None]
    if not scaled or other or key.shape[-1] != value.shape[-1]:
        raise UserError(
            f"a layer of this head attends with {other or 'another scale or value size'}, which is"
            " not supported; choose another source"
        )
    return options["attend"](module.layer_idx, query, key, value), None


AttentionInterface.register(ATTENTION, _attend)


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig:
    version: Literal[1, 3]  # 1 (also EAGLE-2 and HASS) or 3
    # target layers, from 0, whose outputs the head reads, in the order of its ``fc``; for version 1
    # the target's last layer, read after the final norm
    layers: tuple[int, ...]
    # the head's own layers, of which those after the first are plain Llama layers; its vocabulary
    # is the target's
    layer: LlamaConfig
    target_hidden_size: int
    draft_vocab_size: int  # U; below V, the head has a map of its tokens
    fc_bias: bool = False
    norm_before_residual: bool = False  # the first layer's residual is the normed state
    norm_before_fc: bool = False  # one norm over the concatenated streams
    fc_norm: bool = False  # a norm per stream before they are concatenated (EAGLE-3.1)
    norm_output: bool = False  # the output after the head's norm is fed back (EAGLE-3.1)
    # own_embedding and own_output: the head has this matrix; False: it uses the target's
    own_embedding: bool = False
    own_output: bool = True

    @property
    def names(self) -> tuple[HiddenName, ...]:
        return tuple(HiddenName(layer, normed=self.version == 1) for layer in self.layers)

    @property
    def feature_size(self) -> int:
        return len(self.layers) * self.target_hidden_size


def default_layers(num_layers: int) -> tuple[int, int, int]:
    """Returns the indices of the target layers whose outputs an EAGLE-3 head reads if its config
    names none: 1, L // 2 - 1 and L - 4 of L layers, as in the authors' code. Indices outside the
    model become its first or last layer, and indices may repeat.
    """
    low, middle, high = (
        min(max(entering - 1, 0), num_layers - 1)
        for entering in (2, num_layers // 2, num_layers - 3)
    )
    return low, middle, high


def causal(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # noqa: ARG001
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


class EagleHead(nn.Module):
    """An EAGLE head; parameters of its first layer are named ``layers.0.*``, not ``midlayer.*``.
    ``target_ids``, int64[U]: the target's id of each draft token; None if all ids are the same.
    """

    target_ids: Tensor | None

    def __init__(
        self,
        config: EagleConfig,
        *,
        embedding: Tensor | None = None,
        output: nn.Module | None = None,
    ) -> None:
        """Creates the head, with weights as torch initialises them.

        ``embedding`` [V, E] and ``output`` ([.., E] -> [.., V]) are the target's, required if
        ``config`` says that the head has none of its own.
        """
        super().__init__()
        self.config = config
        layer, eps = config.layer, config.layer.rms_norm_eps
        size = layer.hidden_size
        if not config.own_embedding and embedding is None:
            raise ValueError("a head without embeddings needs the target's")
        if not config.own_output and output is None:
            raise ValueError("a head without an output matrix needs the target's")
        # In a tuple: the target's modules are no modules of the head, and are not stored with it.
        self._target: tuple[Any, Any] = (embedding, output)
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(layer.vocab_size, size)
        if config.version == 1:
            self.fc = nn.Linear(2 * size, size, bias=config.fc_bias)
        else:
            self.fc = nn.Linear(config.feature_size, size, bias=config.fc_bias)
            self.norm = nn.RMSNorm(size, eps=eps)
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(config.feature_size, eps=eps)
        if config.fc_norm:
            norms = (nn.RMSNorm(config.target_hidden_size, eps=eps) for _ in config.layers)
            self.fc_norm = nn.ModuleList(norms)
        self.layers = nn.ModuleList(_Layer(config, i) for i in range(layer.num_hidden_layers))
        if config.own_output:
            self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(layer)
        self.register_buffer("target_ids", None)

    def shared_copy(self) -> EagleHead:
        shared = [*self.parameters(), *self.buffers(), *self._target]
        return copy.deepcopy(self, {id(x): x for x in shared})

    @property
    def embedding(self) -> Tensor:
        """Returns the embedding matrix [V, E], the head's own or the target's."""
        return self.embed_tokens.weight if self.config.own_embedding else self._target[0]

    @property
    def output(self) -> nn.Module:
        """Returns the output layer [.., E] -> [.., U], the head's own or the target's."""
        return self.lm_head if self.config.own_output else self._target[1]

    @property
    def shared_output_bytes(self) -> int:
        """Returns the bytes of the target's output layer if this draft head uses it, else 0."""
        return 0 if self.config.own_output else sum(p.nbytes for p in self.output.parameters())

    def states(self, features: Tensor) -> Tensor:
        """Maps the target's concatenated hidden states [.., S] to the head's states [.., E]."""
        config = self.config
        if config.version == 1:
            return features
        if config.fc_norm:
            streams = features.split(config.target_hidden_size, -1)
            parts = [norm(stream) for norm, stream in zip(self.fc_norm, streams, strict=True)]
            features = torch.cat(parts, -1)
        if config.norm_before_fc:
            features = self.input_norm(features)
        fused: Tensor = self.fc(features)
        return fused

    def forward(
        self, tokens: Tensor, states: Tensor, positions: Tensor, attend: Attend = causal
    ) -> Tensor:
        """Returns the outputs of the last layer, [B, T, E].

        Args:
            tokens: int64[B, T].
            states: [B, T, E], the state of the position before each token, computed by
                ``self.states`` if the target has processed that position, else by ``fed_back``.
            positions: int64[B or 1, T].
            attend: attention function, called after rotary embedding. Default: causal attention.
        """
        embedded = F.embedding(tokens, self.embedding)
        rotation = self.rotary(embedded, positions)
        hidden = states
        if self.config.version == 1:
            hidden = self.fc(torch.cat([embedded, states], -1))
        for layer in self.layers:
            hidden = layer(hidden, embedded, rotation, attend)
        return hidden

    def logits(self, outputs: Tensor) -> Tensor:
        """Maps outputs [.., E] to logits over the draft vocabulary, [.., U]."""
        if self.config.version == 3:
            outputs = self.norm(outputs)
        logits: Tensor = self.output(outputs)
        return logits

    def fed_back(self, outputs: Tensor) -> Tensor:
        return self.norm(outputs) if self.config.norm_output else outputs

    def target_logits(self, logits: Tensor) -> Tensor:
        """Maps draft logits [.., U] to the target's vocabulary [.., V]; other tokens get -inf."""
        return spread(logits, self.target_ids, self.config.layer.vocab_size)


class _Layer(nn.Module):
    """A Llama layer of a head. In version 1, the first layer has no ``input_layernorm``; in version
    3, the first layer also has ``hidden_norm``, which normalises the state.
    """

    def __init__(self, config: EagleConfig, index: int) -> None:
        super().__init__()
        size, eps = config.layer.hidden_size, config.layer.rms_norm_eps
        self.first = index == 0 and config.version == 3
        self.norm_before_residual = config.norm_before_residual
        self.self_attn = _Attention(config.layer, index, width=2 * size if self.first else size)
        self.mlp = LlamaMLP(config.layer)
        plain = index > 0 or self.first
        self.input_layernorm: nn.Module = nn.RMSNorm(size, eps=eps) if plain else nn.Identity()
        if self.first:
            self.hidden_norm = nn.RMSNorm(size, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(size, eps=eps)

    def forward(
        self, hidden: Tensor, embedded: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        """Returns the output [B, T, E]. Only layer 0 of version 3 reads ``embedded``."""
        residual = hidden
        if self.first:
            normed = self.hidden_norm(hidden)
            if self.norm_before_residual:
                residual = normed
            inputs = torch.cat([self.input_layernorm(embedded), normed], -1)
        else:
            inputs = self.input_layernorm(hidden)
        hidden = residual + self.self_attn(inputs, rotation, attend)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class _Attention(nn.Module):
    def __init__(self, config: LlamaConfig, index: int, *, width: int) -> None:
        super().__init__()
        self.index, self.head_dim, bias = index, config.head_dim, config.attention_bias
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(width, queries, bias=bias)
        self.k_proj, self.v_proj = (nn.Linear(width, keys, bias=bias) for _ in range(2))
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=bias)

    def forward(self, inputs: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        query, key, value = (
            projection(inputs).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *rotation)
        out: Tensor = self.o_proj(attend(self.index, query, key, value).flatten(2))
        return out
