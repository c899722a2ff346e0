"""Small models with random weights, of any family: for tests, and where there are no weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from specdec.errors import UserError
from specdec.models.inspection import CERTIFIED
from specdec.models.loading import DTYPES, usable_device

_GPT2_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
_NO_HEAD_DIM = {"mistral", "qwen2", "phi3", "olmo2", "starcoder2", "gpt_neox", "opt"}


def random_model(
    family: str = "llama",
    *,
    seed: int = 0,
    dtype: str = "float32",
    device: str = "cpu",
    scale: float = 0.3,
    num_layers: int = 4,
    hidden_size: int = 32,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    vocab_size: int = 61,
    max_positions: int = 256,
    options: dict[str, Any] | None = None,
) -> PreTrainedModel:
    """A model of ``family`` whose weights are drawn from normal(0, ``scale``) with ``seed``.

    The same arguments give the same weights; the global generator is left alone.

    Args:
        family: a model type of transformers; those of ``CERTIFIED`` are tested.
        seed: of the weights.
        dtype, device: a key of ``DTYPES``, torch's name of the device.
        scale: standard deviation of every weight; larger ones give surer predictions.
        num_layers, hidden_size, num_heads, num_kv_heads, vocab_size, max_positions: sizes.
        options: further entries of the family's config, such as {"sliding_window": 8}.

    Raises:
        UserError: for a family or type that is not known, or a device that is not here.
    """
    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r} is unknown; choose one of {', '.join(DTYPES)}")
    sizes = _config_entries(
        family,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        vocab_size=vocab_size,
        max_positions=max_positions,
    )
    sizes |= options or {}
    try:
        config = AutoConfig.for_model(family, **sizes)
    except ValueError as error:
        raise UserError(
            f"model family {family!r} is unknown; choose one of {', '.join(sorted(CERTIFIED))}"
        ) from error
    capped = getattr(config, "attn_logit_softcapping", None)
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(
            config, dtype=DTYPES[dtype], attn_implementation="eager" if capped else "sdpa"
        )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(noise * scale)
    model.requires_grad_(False)
    return model.to(usable_device(device)).eval()


def _config_entries(
    family: str,
    *,
    num_layers: int,
    hidden_size: int,
    num_heads: int,
    num_kv_heads: int,
    vocab_size: int,
    max_positions: int,
) -> dict[str, Any]:
    """The sizes by the names that the family's config gives them."""
    sizes: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "max_position_embeddings": max_positions,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if family in {"gpt2", "gpt_bigcode"}:
        sizes = {_GPT2_NAMES.get(name, name): value for name, value in sizes.items()}
    elif family == "opt":
        sizes |= {"ffn_dim": 2 * hidden_size, "word_embed_proj_dim": hidden_size // 2}
    else:
        sizes |= {"intermediate_size": 2 * hidden_size}
        if family != "gpt_neox":
            sizes |= {"num_key_value_heads": num_kv_heads}
        if family not in _NO_HEAD_DIM:
            sizes |= {"head_dim": hidden_size // num_heads}
    return sizes
