"""The trained Llama: transformers' LlamaForCausalLM with seeded weights and mixed precision.

Weights, residuals and norms are float32; matrix products and attention run in a compute dtype,
under torch.autocast.

Shape letters: B sequences, S positions, E hidden, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save
from torch import Tensor, nn
from transformers import Cache, LlamaConfig, LlamaForCausalLM

from specdec.data.files import read_json_object
from specdec.errors import UserError
from specdec.files import write_bytes, write_json
from specdec.models.slicing import cache_argument
from specdec.parts.fields import Count, Positive


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of one Llama with tied embeddings.

    ``hidden`` is the width E of the residual stream, ``feed_forward`` the inner width of the
    feed-forward block. num_heads is a multiple of num_kv_heads; head_dim is even.
    """

    num_layers: Count
    hidden: Count
    feed_forward: Count
    num_heads: Count
    num_kv_heads: Count
    head_dim: Count
    vocab_size: Count = 4096
    max_positions: Count = 2048
    rope_theta: Positive = 10000.0

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise UserError(f"head_dim must be even, got {self.head_dim}")


INIT_STD = 0.02
_CONFIG_KEYS = {
    "num_layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "feed_forward": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "max_positions": "max_position_embeddings",
}
"""Field of ModelShape -> its name in transformers' configuration."""
_REQUIRED_SIZES = ("num_layers", "hidden", "feed_forward", "num_heads", "num_kv_heads")
_FORMAT = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "eos_token_id": 0,
}
"""Entries of config.json that all trained models share."""


def _llama_config(shape: ModelShape) -> LlamaConfig:
    return LlamaConfig(
        **{key: getattr(shape, name) for name, key in _CONFIG_KEYS.items()},
        **_FORMAT,
        architectures=["LlamaForCausalLM"],
        initializer_range=INIT_STD,
        rope_parameters={"rope_theta": shape.rope_theta, "rope_type": "default"},
        bos_token_id=0,
        pad_token_id=0,
        dtype="bfloat16",  # of the saved weights
    )


def compiled_if(compiled: bool, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns the function, through torch.compile with static shapes if ``compiled``."""
    return torch.compile(function, dynamic=False) if compiled else function


def _layer_output(layer: nn.Module, x_BSE: Tensor, rotations: tuple[Tensor, Tensor]) -> Tensor:
    return layer(x_BSE, position_embeddings=rotations)


def _token_loss(h_BSE: Tensor, embedding_VE: Tensor, targets_BS: Tensor) -> Tensor:
    logits = F.linear(h_BSE.flatten(0, 1), embedding_VE).float()
    return F.cross_entropy(logits, targets_BS.flatten())


class LanguageModel(LlamaForCausalLM):
    """transformers' Llama under its own parameter names; calling it returns float32 logits.

    Products run in ``compute_dtype``. With ``compiled=True`` one layer (shared by all) and the loss
    are compiled; the first step of each sequence shape then takes up to a minute on two cores.
    """

    ends = (0,)  # ids of end tokens; the first one separates texts

    def __init__(
        self,
        shape: ModelShape,
        *,
        generator: torch.Generator | None = None,
        compute_dtype: torch.dtype = torch.float32,
        compiled: bool = False,
    ) -> None:
        """Draws normal weights of deviation INIT_STD, less on matrices that add to the residual.

        The draws are from torch's global generator if ``generator`` is None.
        """
        super().__init__(_llama_config(shape))
        self.shape, self.compute_dtype, self.compiled = shape, compute_dtype, compiled
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                adds_to_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = INIT_STD / (2 * shape.num_layers) ** 0.5 if adds_to_residual else INIT_STD
                nn.init.normal_(weight, std=std, generator=generator)
        self._layer = compiled_if(compiled, _layer_output)
        self._loss = compiled_if(compiled, _token_loss)

    def autocast(self) -> torch.autocast:
        lower = self.compute_dtype != torch.float32
        return torch.autocast(self.device.type, dtype=self.compute_dtype, enabled=lower)

    def residuals(self, tokens_BS: Tensor, after: Collection[int] = ()) -> dict[int, Tensor]:
        """Returns the residual streams, float32 (B, S, E), after these numbers of layers.

        The last stream, before the final norm, is always among them.
        """
        x_BSE = self.model.embed_tokens(tokens_BS)
        streams = {}
        for number, layer in enumerate(self.model.layers, start=1):
            x_BSE = self.run_layer(layer, x_BSE)
            if number in after or number == self.shape.num_layers:
                streams[number] = x_BSE
        return streams

    @property
    def layers(self) -> nn.ModuleList:
        return self.model.layers

    @property
    def norm(self) -> nn.Module:
        return self.model.norm

    def run_layer(self, layer: nn.Module, x_BSE: Tensor, number: int = 0) -> Tensor:
        """Runs a layer of this shape, possibly of another model, on a residual stream (B, S, E).

        ``number`` exists for targets whose layers differ by position; those of a Llama are alike.
        """
        positions = torch.arange(x_BSE.shape[1], device=x_BSE.device)[None]
        with self.autocast():
            return self._layer(layer, x_BSE, self.model.rotary_emb(x_BSE, positions))

    def forward(self, tokens_BS: Tensor) -> Tensor:
        return self.logits(self.residuals(tokens_BS)[self.shape.num_layers])

    def logits(self, x_BSE: Tensor) -> Tensor:
        """Returns float32 logits (B, S, V), given the residual stream after the last layer."""
        with self.autocast():
            return self.lm_head(self.model.norm(x_BSE)).float()

    def next_logits(self, tokens_BS: Tensor, cache: Cache) -> Tensor:
        """Returns float32 logits (B, V) after the last token; adds the tokens to the cache."""
        with self.autocast():
            kept = {cache_argument(self.model): cache}
            h_BSE = self.model(tokens_BS, use_cache=True, **kept).last_hidden_state
            return self.lm_head(h_BSE[:, -1]).float()

    def loss(self, inputs_BS: Tensor, targets_BS: Tensor) -> Tensor:
        x_BSE = self.residuals(inputs_BS)[self.shape.num_layers]
        with self.autocast():
            return self._loss(self.model.norm(x_BSE), self.lm_head.weight, targets_BS)


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Returns parameters by name; a tied one is listed once."""
    return {name: weight.detach() for name, weight in module.named_parameters()}


def load_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copies what ``weights_of`` returned into a module; names must be the same."""
    missing, unknown = module.load_state_dict(weights, strict=False)
    missing = sorted({*missing} & weights_of(module).keys())  # not buffers, nor what is tied
    if missing or unknown:
        raise UserError(f"weights do not fit the model: missing {missing}, unknown {unknown}")


def weights_hash(module: nn.Module) -> str:
    """Returns 16 hexadecimal digits of the SHA-256 of a module's weights, whatever their device."""
    digest = hashlib.sha256()
    for name, weight in sorted(weights_of(module).items()):
        digest.update(name.encode())
        digest.update(weight.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def save_weights(module: nn.Module, path: Path, metadata: Mapping[str, str]) -> None:
    """Writes a safetensors file of bfloat16 weights, atomically."""
    weights = {n: w.to("cpu", torch.bfloat16).contiguous() for n, w in weights_of(module).items()}
    write_bytes(path, save(weights, metadata={"format": "pt", **metadata}))


def save_hf(model: LanguageModel, folder: Path) -> None:
    """Writes config.json, generation_config.json and model.safetensors (bfloat16), atomically."""
    write_json(folder / "config.json", model.config.to_diff_dict())
    generation = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
    write_json(folder / "generation_config.json", generation)
    save_weights(model, folder / "model.safetensors", {})


_REQUIRED = {"model_type": "llama", **_FORMAT, "rope_type": "default"}


def _read_config(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    path = folder / "config.json"
    config: dict[str, Any] = read_json_object(path)
    rope: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        stated = config.get(key) or {}
        if not isinstance(stated, dict):
            raise UserError(f"{path} has {key}={stated!r}, which is no object: copy it again")
        rope |= stated
    return config, rope


def _differences(config: Mapping[str, Any], rope: Mapping[str, Any]) -> list[str]:
    defaults = {"tie_word_embeddings": False, "eos_token_id": 2}  # transformers' defaults
    rope_type = rope.get("rope_type", "default")
    actual = _REQUIRED | defaults | dict(config) | {"rope_type": rope_type}
    return [f"{k}={actual[k]!r}" for k, value in _REQUIRED.items() if actual[k] != value]


def is_own_format(folder: Path) -> bool:
    """Whether ``save_hf`` can have written the folder; for other models only heads are trained."""
    return (folder / "model.safetensors").exists() and not _differences(*_read_config(folder))


def read_shape(folder: Path) -> ModelShape:
    """Reads the sizes of a model from config.json; refuses other formats than ``save_hf``'s."""
    path = folder / "config.json"
    config, rope = _read_config(folder)
    different = _differences(config, rope)
    if different:
        raise UserError(
            f"{folder} has {', '.join(different)}; the training recipes need a Llama with"
            f" {', '.join(f'{key}={value!r}' for key, value in _REQUIRED.items())}, as"
            " `specdec train target` writes it"
        )
    sizes = {name: config[key] for name, key in _CONFIG_KEYS.items() if config.get(key)}
    wrong = [f"{_CONFIG_KEYS[n]}={v!r}" for n, v in sizes.items() if type(v) is not int or v < 1]
    wrong += [f"no {_CONFIG_KEYS[name]}" for name in _REQUIRED_SIZES if name not in sizes]
    rope_theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    if not (type(rope_theta) in (int, float) and 0 < rope_theta < float("inf")):
        wrong.append(f"rope_theta={rope_theta!r}")
    if wrong:
        raise UserError(f"{path} lacks usable sizes ({', '.join(wrong)}): copy it again")
    sizes.setdefault("head_dim", sizes["hidden"] // sizes["num_heads"])
    return ModelShape(**sizes, rope_theta=rope_theta)


def load_hf(
    folder: Path, *, compute_dtype: torch.dtype = torch.float32, compiled: bool = False
) -> LanguageModel:
    """Reads a model of the format of ``save_hf`` (see ``read_shape``); weights become float32."""
    model = LanguageModel(read_shape(folder), compute_dtype=compute_dtype, compiled=compiled)
    load_weights(model, load_file(folder / "model.safetensors"))
    return model


def grow(model: LanguageModel, num_layers: int) -> LanguageModel:
    """Deepens a model to a multiple of its depth by repeating the layers (ABC becomes ABCABC)."""
    depth = model.shape.num_layers
    if num_layers % depth:
        raise UserError(f"{num_layers} layers are not a multiple of {depth}")
    return with_layers(model, [layer % depth for layer in range(num_layers)])


def with_layers(model: LanguageModel, layers: Sequence[int]) -> LanguageModel:
    depth = model.shape.num_layers
    if not layers or not all(0 <= layer < depth for layer in layers):
        raise UserError(f"layers {list(layers)} are not layers of a model of {depth}")
    shape = replace(model.shape, num_layers=len(layers))
    copy = LanguageModel(shape, compute_dtype=model.compute_dtype, compiled=model.compiled)
    load_weights(copy.model.embed_tokens, weights_of(model.model.embed_tokens))
    load_weights(copy.model.norm, weights_of(model.model.norm))
    for new, layer in zip(copy.model.layers, layers, strict=True):
        load_weights(new, weights_of(model.model.layers[layer]))
    return copy
