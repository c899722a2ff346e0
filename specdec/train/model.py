"""A Llama for training: the mathematics of transformers' LlamaForCausalLM in few operations.

Parameter names are those of transformers, so a state dict loads there unchanged. Residuals and
norms are float32; matrix products and attention run in a chosen compute dtype.

Shape letters: B sequences, S positions, E hidden, H query heads, K key/value heads, D head size,
V vocabulary, F feed-forward.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save
from torch import Tensor, nn

from specdec.errors import UserError
from specdec.files import write_bytes, write_json


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of one Llama.

    Attributes:
        num_layers: decoder layers.
        hidden: residual width E.
        feed_forward: feed-forward width F.
        num_heads, num_kv_heads, head_dim: attention; num_heads is a multiple of num_kv_heads.
        vocab_size: token ids; embeddings are tied.
        max_positions: longest sequence.
        rope_theta: base of the rotary frequencies.
    """

    num_layers: int
    hidden: int
    feed_forward: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int = 4096
    max_positions: int = 2048
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        """Checks what the sizes must satisfy."""
        if self.num_heads % self.num_kv_heads:
            raise UserError(f"{self.num_heads} heads do not share {self.num_kv_heads} evenly")
        if self.head_dim % 2:
            raise UserError(f"head_dim must be even, got {self.head_dim}")
        if self.num_layers < 1:
            raise UserError(f"num_layers must be at least 1, got {self.num_layers}")


EPSILON = 1e-6
INIT_STD = 0.02


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """x over its root mean square along the last axis, times a weight per entry."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON) * weight


def _rotate(x_BHSD: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
    half = x_BHSD.shape[-1] // 2
    turned = torch.cat((-x_BHSD[..., half:], x_BHSD[..., :half]), dim=-1)
    return x_BHSD * cos_SD + turned * sin_SD


class _Scale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))


class _Attention(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, queries, bias=False)
        self.k_proj = nn.Linear(shape.hidden, keys, bias=False)
        self.v_proj = nn.Linear(shape.hidden, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden, bias=False)


class _FeedForward(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.feed_forward, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.feed_forward, bias=False)
        self.down_proj = nn.Linear(shape.feed_forward, shape.hidden, bias=False)


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, shape: ModelShape) -> None:
        """Takes the model's sizes; weights are drawn by LanguageModel."""
        super().__init__()
        self.input_layernorm = _Scale(shape.hidden)
        self.self_attn = _Attention(shape)
        self.post_attention_layernorm = _Scale(shape.hidden)
        self.mlp = _FeedForward(shape)
        self.shape = shape

    def queries_keys_values(
        self, x_BSE: Tensor, cos_SD: Tensor, sin_SD: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries (B, H, S, D), rotated keys and values (B, K, S, D), all in `dtype`."""
        shape, attention = self.shape, self.self_attn
        batch, length, _ = x_BSE.shape
        h = rms_norm(x_BSE, self.input_layernorm.weight).to(dtype)
        q = F.linear(h, attention.q_proj.weight.to(dtype))
        k = F.linear(h, attention.k_proj.weight.to(dtype))
        v = F.linear(h, attention.v_proj.weight.to(dtype))
        q = q.view(batch, length, shape.num_heads, shape.head_dim).transpose(1, 2)
        k = k.view(batch, length, shape.num_kv_heads, shape.head_dim).transpose(1, 2)
        v = v.view(batch, length, shape.num_kv_heads, shape.head_dim).transpose(1, 2)
        q = _rotate(q.float(), cos_SD, sin_SD).to(dtype)
        k = _rotate(k.float(), cos_SD, sin_SD).to(dtype)
        return q, k, v

    def finish(self, x_BSE: Tensor, mixed_BHSD: Tensor, dtype: torch.dtype) -> Tensor:
        """Residual stream after the output projection and the feed-forward, float32."""
        batch, length, _ = x_BSE.shape
        mixed = mixed_BHSD.transpose(1, 2).reshape(batch, length, -1)
        x_BSE = x_BSE + F.linear(mixed, self.self_attn.o_proj.weight.to(dtype))
        h = rms_norm(x_BSE, self.post_attention_layernorm.weight).to(dtype)
        gate = F.linear(h, self.mlp.gate_proj.weight.to(dtype))
        up = F.linear(h, self.mlp.up_proj.weight.to(dtype))
        return x_BSE + F.linear(F.silu(gate) * up, self.mlp.down_proj.weight.to(dtype))

    def forward(self, x_BSE: Tensor, cos_SD: Tensor, sin_SD: Tensor, dtype: torch.dtype) -> Tensor:
        """Residual stream after this layer, float32; products run in `dtype`."""
        q, k, v = self.queries_keys_values(x_BSE, cos_SD, sin_SD, dtype)
        share = self.shape.num_heads // self.shape.num_kv_heads
        k = k.repeat_interleave(share, dim=1)
        v = v.repeat_interleave(share, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.finish(x_BSE, mixed, dtype)


def token_loss(
    x_BSE: Tensor, norm_E: Tensor, embedding_VE: Tensor, targets_BS: Tensor, dtype: torch.dtype
) -> Tensor:
    """Mean next-token cross entropy in nats, from the last residual stream."""
    h = rms_norm(x_BSE, norm_E).to(dtype).flatten(0, 1)
    logits = F.linear(h, embedding_VE.to(dtype)).float()
    return F.cross_entropy(logits, targets_BS.flatten())


class _Decoder(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = _Scale(shape.hidden)


class LanguageModel(nn.Module):
    """Llama with tied embeddings.

    `compiled=True` compiles one layer (shared by all) and the loss; the first step of each
    sequence shape then takes up to a minute on two cores.
    """

    def __init__(
        self,
        shape: ModelShape,
        *,
        generator: torch.Generator | None = None,
        dtype: torch.dtype = torch.float32,
        compiled: bool = False,
    ) -> None:
        """Draws weights: normal of deviation INIT_STD, smaller on the way into the residual."""
        super().__init__()
        self.shape = shape
        self.dtype = dtype
        self.model = _Decoder(shape)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = INIT_STD / (2 * shape.num_layers) ** 0.5 if into_residual else INIT_STD
                nn.init.normal_(weight, std=std, generator=generator)
        powers = torch.arange(0, shape.head_dim, 2).float() / shape.head_dim
        angles = torch.outer(torch.arange(shape.max_positions).float(), shape.rope_theta**-powers)
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self._block: Callable[..., Tensor] = Block.forward
        self._loss: Callable[..., Tensor] = token_loss
        if compiled:
            self._block = torch.compile(Block.forward, dynamic=False)
            self._loss = torch.compile(token_loss, dynamic=False)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.model.embed_tokens.weight.device

    def residual(self, tokens_BS: Tensor) -> Tensor:
        """Residual stream after the last layer, (B, S, E) float32, before the final norm."""
        return self.residuals(tokens_BS, ())[self.shape.num_layers]

    def residuals(self, tokens_BS: Tensor, after: Collection[int]) -> dict[int, Tensor]:
        """Residual streams, (B, S, E) float32 each, by the number of layers behind them.

        Those named by `after`, and that after the last layer.
        """
        x = F.embedding(tokens_BS, self.model.embed_tokens.weight)
        found = {}
        for done, layer in enumerate(self.model.layers, start=1):
            x = self.run_layer(layer, x)
            if done in after or done == self.shape.num_layers:
                found[done] = x
        return found

    def run_layer(self, layer: nn.Module, x_BSE: Tensor) -> Tensor:
        """One layer of this shape, its own or another's, over positions from 0 on."""
        length = x_BSE.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]  # type: ignore[index]
        return self._block(layer, x_BSE, cos, sin, self.dtype)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Logits, (B, S, V) float32."""
        return self.logits(self.residual(tokens_BS))

    def logits(self, x_BSE: Tensor) -> Tensor:
        """Logits, (B, S, V) float32, of a last residual stream."""
        h = rms_norm(x_BSE, self.model.norm.weight).to(self.dtype)
        return F.linear(h, self.model.embed_tokens.weight.to(self.dtype)).float()

    def loss(self, inputs_BS: Tensor, targets_BS: Tensor) -> Tensor:
        """Mean cross entropy of targets given inputs, in nats per token."""
        norm, embedding = self.model.norm.weight, self.model.embed_tokens.weight
        return self._loss(self.residual(inputs_BS), norm, embedding, targets_BS, self.dtype)


def hf_config(shape: ModelShape) -> dict[str, object]:
    """The config.json of transformers' LlamaForCausalLM for these sizes, bfloat16 weights."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.feed_forward,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_positions,
        "hidden_act": "silu",
        "rms_norm_eps": EPSILON,
        "initializer_range": INIT_STD,
        "rope_parameters": {"rope_theta": shape.rope_theta, "rope_type": "default"},
        "tie_word_embeddings": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "dtype": "bfloat16",
        "use_cache": True,
    }


def save_hf(model: LanguageModel, folder: Path) -> None:
    """Writes config.json, generation_config.json and model.safetensors (bfloat16), each at once."""
    write_json(folder / "config.json", hf_config(model.shape))
    generation = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
    write_json(folder / "generation_config.json", generation)
    weights = {
        name: value.detach().to("cpu", torch.bfloat16).contiguous()
        for name, value in model.state_dict().items()
    }
    write_bytes(folder / "model.safetensors", save(weights, metadata={"format": "pt"}))


def check_format(config: Mapping[str, Any], folder: Path) -> None:
    """Refuses a config.json that this module would compute otherwise than it says.

    Raises:
        UserError: another family, untied embeddings, biases, other norms, scaled rotary frequencies
            or an end token that is not 0.
    """
    wanted = {
        **{"model_type": "llama", "hidden_act": "silu", "rms_norm_eps": EPSILON},
        **{"tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False},
        **{"eos_token_id": 0, "rope_type": "default"},
    }
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    absent = {"tie_word_embeddings": False, "eos_token_id": 2}  # transformers' defaults
    found = {**wanted, **absent, **config, "rope_type": rope.get("rope_type", "default")}
    other = [f"{key}={found[key]!r}" for key, value in wanted.items() if found[key] != value]
    if other:
        raise UserError(
            f"{folder} is no model of the format that `specdec train target` writes:"
            f" {', '.join(other)}; the recipes train on Llamas with"
            f" {', '.join(f'{key}={value!r}' for key, value in wanted.items())}"
        )


def load_hf(
    folder: Path, *, dtype: torch.dtype = torch.float32, compiled: bool = False
) -> LanguageModel:
    """Reads what save_hf wrote; weights become float32, products run in `dtype`.

    Raises:
        UserError: a model of another format, see ``check_format``.
    """
    config = json.loads((folder / "config.json").read_text())
    check_format(config, folder)
    rope = config.get("rope_parameters") or {}
    shape = ModelShape(
        num_layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        feed_forward=config["intermediate_size"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        vocab_size=config["vocab_size"],
        max_positions=config["max_position_embeddings"],
        rope_theta=rope.get("rope_theta", config.get("rope_theta", 10000.0)),
    )
    model = LanguageModel(shape, dtype=dtype, compiled=compiled)
    weights = {k: v.float() for k, v in load_file(folder / "model.safetensors").items()}
    weights.pop("lm_head.weight", None)
    model.load_state_dict(weights)
    return model


def grow(model: LanguageModel, num_layers: int, *, compiled: bool = False) -> LanguageModel:
    """A deeper model whose layers repeat the given one's in order (ABC becomes ABCABC).

    Raises:
        UserError: num_layers is not a multiple of the present depth.
    """
    depth = model.shape.num_layers
    if num_layers % depth:
        raise UserError(f"{num_layers} layers are not a multiple of {depth}")
    return with_layers(model, [layer % depth for layer in range(num_layers)], compiled=compiled)


def with_layers(
    model: LanguageModel, layers: Sequence[int], *, compiled: bool = False
) -> LanguageModel:
    """A model with copies of the embedding, the final norm and some layers of the given one.

    Args:
        model: is not changed.
        layers: indices of the layers to take, in their new order.
        compiled: see LanguageModel.

    Raises:
        UserError: no layers, or one that the model has not.
    """
    depth = model.shape.num_layers
    if not layers or not all(0 <= layer < depth for layer in layers):
        raise UserError(f"layers {list(layers)} are not layers of a model of {depth}")
    sizes = asdict(model.shape) | {"num_layers": len(layers)}
    other = LanguageModel(ModelShape(**sizes), dtype=model.dtype, compiled=compiled)
    old, new = model.state_dict(), {}
    for name in other.state_dict():
        parts = name.split(".")
        if parts[1] == "layers":
            parts[2] = str(layers[int(parts[2])])
        new[name] = old[".".join(parts)].clone()
    other.load_state_dict(new)
    return other
