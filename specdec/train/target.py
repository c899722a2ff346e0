"""The target that heads are trained for: this library's own Llama, or any model that it decodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import Cache, PretrainedConfig, PreTrainedModel

from specdec.errors import UserError
from specdec.models.config_values import config_value
from specdec.models.frozen import FrozenModel
from specdec.models.loading import load_model
from specdec.models.slicing import cache_argument
from specdec.train.model import LanguageModel, ModelShape, is_own_format
from specdec.train.session import Session


class FrozenTarget(FrozenModel):
    """A model of any family, with those members of ``LanguageModel`` that recipes of heads use.

    ``ends`` are its end tokens, of which the first separates texts. Only losses are compiled for
    such a target.
    """

    compiled = False

    def __init__(
        self, model: PreTrainedModel, *, ends: tuple[int, ...], compute_dtype: torch.dtype
    ) -> None:
        super().__init__(model, compute_dtype=compute_dtype)
        self.ends, self.shape = ends, _shape_of(self.config)

    def next_logits(self, tokens_BS: Tensor, cache: Cache) -> Tensor:
        """Returns float32 logits (B, V) after the last token; adds the tokens to the cache."""
        with self.autocast():
            kept = {cache_argument(self.model): cache}
            out = self.model(input_ids=tokens_BS, use_cache=True, **kept)
            logits: Tensor = out.logits[:, -1].float()
        return logits


Target: TypeAlias = LanguageModel | FrozenTarget


def _shape_of(config: PretrainedConfig) -> ModelShape:
    """Returns the sizes that a model's text config states.

    Heads do not depend on them: they read the sizes of a layer from the layer.
    """

    def stated(name: str, default: int) -> int:
        return int(config_value(config, name, default))

    heads, hidden = int(config.num_attention_heads), int(config.hidden_size)
    return ModelShape(
        num_layers=int(config.num_hidden_layers),
        hidden=hidden,
        feed_forward=stated("intermediate_size", 4 * hidden),
        num_heads=heads,
        num_kv_heads=stated("num_key_value_heads", heads),
        head_dim=stated("head_dim", hidden // heads),
        vocab_size=int(config.vocab_size),
        max_positions=stated("max_position_embeddings", 2048),
    )


def end_ids(folder: Path) -> tuple[int, ...]:
    """Returns the end tokens of a model's folder, first that of its configuration.

    A folder with a tokenizer only has ``<|end|>``, id 0, as this library's tokenizers do.
    """
    found: list[int] = []
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        config: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        stated = config.get("eos_token_id", (config.get("text_config") or {}).get("eos_token_id"))
        if stated is not None:
            found += stated if isinstance(stated, list) else [stated]
    if not found and (folder / "config.json").exists():
        raise UserError(f"{folder / 'config.json'} has no eos_token_id, which separates texts")
    return tuple(dict.fromkeys(found)) or (0,)


def load_target(session: Session, folder: Path) -> Target:
    """Reads a target with the session's compute dtype, onto its device; weights are float32."""
    if is_own_format(folder):
        return session.load(folder)
    model = load_model(folder, dtype="float32", device=str(session.place))
    return FrozenTarget(model, ends=end_ids(folder), compute_dtype=session.dtype)
