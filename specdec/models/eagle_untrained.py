"""Untrained EAGLE heads, which training starts from and which tests of equality run."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from specdec.errors import UserError
from specdec.models.config_values import config_value
from specdec.models.eagle import EagleConfig, EagleHead, default_layers

_SEED = 0


def untrained_config(version: Literal[1, 3], target: Any, **variants: Any) -> EagleConfig:
    """Describes a one-layer head in the shapes of a target's layers, with its vocabulary.

    ``target`` is transformers' config; ``variants`` are other values of fields of ``EagleConfig``.
    """
    text = target.get_text_config()
    try:
        hidden, heads = int(text.hidden_size), int(text.num_attention_heads)
        num_layers, vocab = int(text.num_hidden_layers), int(text.vocab_size)
        positions = int(text.max_position_embeddings)
    except AttributeError as error:
        raise UserError(
            f"an EAGLE head for a target of model_type {target.model_type!r} cannot be made: its"
            f" config has no {error.name}; use another family, such as llama or qwen3"
        ) from error
    fields: dict[str, Any] = {
        "version": version,
        "layers": default_layers(num_layers) if version == 3 else (num_layers - 1,),
        "hidden_size": hidden,
        "intermediate_size": int(config_value(text, "intermediate_size", 4 * hidden)),
        "num_heads": heads,
        "num_kv_heads": int(config_value(text, "num_key_value_heads", heads)),
        "head_dim": int(config_value(text, "head_dim", hidden // heads)),
        "target_hidden_size": hidden,
        "vocab_size": vocab,
        "draft_vocab_size": vocab,
        "eps": float(config_value(text, "rms_norm_eps", 1e-6)),
        "max_positions": positions,
        "own_output": version == 3,
    }
    return EagleConfig(**{**fields, **variants})


def untrained_head(
    version: Literal[1, 3], target: Any, *, embedding: Tensor, output: nn.Module
) -> EagleHead:
    """Returns a head with random weights, the same at every call.

    ``embedding``, [V, E] of the target, defines dtype and device.
    """
    size = int(target.get_text_config().hidden_size)
    own_embedding = embedding.shape[1] != size
    config = untrained_config(version, target, own_embedding=own_embedding)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        head = EagleHead(config, embedding=embedding, output=output)
    return head.to(embedding.device, embedding.dtype).requires_grad_(False).eval()
