"""Runs one token through a slice of a model to find out how its layers attend."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor
from transformers import PreTrainedModel

from specdec.attention.kv_storage import CacheSpec
from specdec.attention.tree_attention import ScoreOptions, Step
from specdec.errors import UserError
from specdec.models.backends.eager import forward_inputs
from specdec.models.config_values import config_value
from specdec.models.slicing import layers_name

_IGNORED = frozenset(
    {"is_causal", "layer_idx", "output_attentions", "position_ids", "use_cache", "cache_position"}
)


class Probe(Step):
    """A plan that records the shapes of keys and rejects unsupported attention arguments.

    Attributes:
        shapes: index within the slice -> (key/value heads G, head size D).
        options: index within the slice -> how the layer computes its scores.
        windowed: layers of the slice with a sliding window.
    """

    def __init__(self, *, model_type: str, first_layer: int, hidden: Tensor | None) -> None:
        super().__init__(first_layer=first_layer, hidden=hidden)
        self.shapes: dict[int, tuple[int, int]] = {}
        self.options: dict[int, ScoreOptions] = {}
        self.num_heads = 0
        self.windowed: set[int] = set()
        self._model_type = model_type

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: ScoreOptions) -> Tensor:
        unknown = [k for k, v in options.others.items() if k not in _IGNORED and v is not None]
        if unknown or key.shape != value.shape:
            raise UserError(
                f"model type {self._model_type!r} cannot be used: tree attention does not support "
                f"features of its attention ({', '.join(unknown) or 'unequal key and value'}); use "
                "a plain decoder-only family such as llama, qwen3 or gpt2"
            )
        self.shapes[self.cache.layer] = (key.shape[1], key.shape[3])
        self.options[self.cache.layer] = options
        self.num_heads = query.shape[1]
        if options.window is not None:
            self.windowed.add(self.cache.layer)
        return rearrange(torch.zeros_like(query), "b h r d -> b r h d")


def probed(model: PreTrainedModel, first_layer: int) -> tuple[CacheSpec, Probe]:
    """Returns the shape and dtype of a slice's keys and values, and the recorded options."""
    config = model.config.get_text_config()
    kind = config.model_type
    layers = model.get_submodule(layers_name(model))
    like = next(layers[0].parameters())  # type: ignore[index]
    hidden = like.new_zeros(1, 1, config.hidden_size) if first_layer else None
    probe = Probe(model_type=kind, first_layer=first_layer, hidden=hidden)
    zero = torch.zeros(1, dtype=torch.int64, device=like.device)
    try:
        with torch.inference_mode():
            model.base_model(**forward_inputs(model, probe, zero, zero))
    except (AttributeError, TypeError, KeyError, IndexError) as error:  # other kinds of caches
        raise UserError(
            f"model type {kind!r} cannot be used: it needs another cache than one of keys"
            f" and values ({error}); use a plain decoder-only family such as llama, qwen3 or"
            " gpt2"
        ) from error
    num_layers = len(layers)  # type: ignore[arg-type]
    if sorted(probe.shapes) != list(range(num_layers)) or len({*probe.shapes.values()}) > 1:
        raise UserError(
            f"model type {kind!r} cannot be used: its layers do not all attend through "
            "transformers' attention interface with keys and values of one shape (observed: "
            f"{probe.shapes}); use a plain decoder-only family such as llama, qwen3 or gpt2"
        )
    kinds = config_value(config, "layer_types", ["full_attention"] * num_layers)
    windowed = {i for i, name in enumerate(kinds) if name == "sliding_attention"}
    if {*kinds} - {"full_attention", "sliding_attention"} or not windowed <= probe.windowed:
        raise UserError(
            f"model type {kind!r} cannot be used: its layers are {sorted({*kinds})}, and "
            f"{len(probe.windowed)} of {num_layers} use a sliding window; use a family "
            "with full and sliding attention only, such as llama, qwen3 or gemma3_text"
        )
    num_kv_heads, head_dim = probe.shapes[0]
    spec = CacheSpec(
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=like.dtype,
        device=like.device,
    )
    return spec, probe
