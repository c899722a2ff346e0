"""Small models of any transformers model type, random weights; for tests and ``model=random``."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specdec.errors import UserError
from specdec.models.config_values import config_value
from specdec.models.inspection import CERTIFIED
from specdec.models.loading import reference_attention, torch_dtype, usable_device

WINDOWED = frozenset({"mistral", "gemma2", "gemma3_text", "phi3", "starcoder2", "qwen2", "qwen3"})
"""Families of ``CERTIFIED`` that can attend through a sliding window."""

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
    """Returns a model of ``family`` with normally distributed weights of standard deviation
    ``scale``. Equal arguments give equal weights, whatever the state of torch's global generator;
    ``options`` are further entries of the family's config.
    """
    kind = torch_dtype(dtype)
    sizes = {
        "num_hidden_layers": num_layers,
        "hidden_size": hidden_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "vocab_size": vocab_size,
        "max_position_embeddings": max_positions,
    }
    entries = _config_entries(family, sizes) | (options or {})
    if family not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UserError(
            f"model.family={family} is no causal language model of transformers: choose one of"
            f" {', '.join(sorted(CERTIFIED))}"
        )
    config = AutoConfig.for_model(family, **entries)
    text = config.get_text_config()
    if any(config_value(text, key) != sizes[key] for key in ("num_hidden_layers", "hidden_size")):
        raise UserError(
            f"model.family={family} would ignore model.num_layers and model.hidden_size: name its"
            f" language model, model.family={text.model_type}"
        )
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=kind,
            attn_implementation=reference_attention(config),
            experts_implementation="eager",  # others have no float64
        )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(noise * scale)
    model.requires_grad_(False)
    return model.to(usable_device(device)).eval()


def _config_entries(family: str, sizes: dict[str, int]) -> dict[str, Any]:
    width = sizes["hidden_size"]
    entries: dict[str, Any] = sizes | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    if family in {"gpt2", "gpt_bigcode", "opt", "gpt_neox"}:
        del entries["num_key_value_heads"]
    if family in {"gpt2", "gpt_bigcode"}:
        return entries
    if family == "opt":
        return entries | {"ffn_dim": 2 * width, "word_embed_proj_dim": width // 2}
    entries["intermediate_size"] = 2 * width
    if family not in _NO_HEAD_DIM:
        entries["head_dim"] = width // sizes["num_attention_heads"]
    return entries


def window_options(family: str, window: int, num_layers: int) -> dict[str, Any]:
    """Returns ``options`` for ``random_model`` that give its layers a sliding window of ``window``
    positions. Every second layer of Gemma, and the first layer of Qwen, have full attention.
    """
    if family not in WINDOWED:
        raise UserError(
            f"model family {family!r} has no sliding window; choose one of"
            f" {', '.join(sorted(WINDOWED))}, or leave sliding_window out"
        )
    options: dict[str, Any] = {"sliding_window": window}
    if family in ("qwen2", "qwen3"):
        options |= {"use_sliding_window": True, "max_window_layers": 1}
    if family == "gemma3_text":
        kinds = ("sliding_attention", "full_attention")
        options["layer_types"] = [kinds[layer % 2] for layer in range(num_layers)]
    return options
