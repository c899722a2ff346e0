"""Trains a small draft model: some of the target's layers, its embedding and output matrix.

Shape letters: see ``train.drafter``.
"""

import copy
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from specdec.errors import UserError
from specdec.models.config_values import config_value
from specdec.models.frozen import FrozenModel
from specdec.models.slicing import layers_name
from specdec.parts.fields import Index, validated
from specdec.train.drafter import Drafter, chosen_rows, goal_of
from specdec.train.heads import drafted_one_by_one
from specdec.train.losses import LossOptions
from specdec.train.texts import Batch


@validated
@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSpec:
    """Options for training a small draft model. ``layers`` are the target layers (from 0) of which
    it is made; None: the first and the last. ``train_embedding``: whether the embedding and the
    output matrix are trained too.
    """

    layers: tuple[Index, ...] | None = None
    train_embedding: bool = False


def some_layers(model: PreTrainedModel, layers: tuple[int, ...]) -> PreTrainedModel:
    """Returns a float32 copy of a model that has only its ``layers`` (numbers from 0)."""
    config, name = copy.deepcopy(model.config), layers_name(model)
    text = config.get_text_config()
    text.num_hidden_layers = len(layers)
    if kinds := config_value(text, "layer_types"):
        text.layer_types = [kinds[layer] for layer in layers]
    made: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for key, weight in made.named_parameters():
            rest = key.removeprefix(f"{name}.")
            if rest != key:
                number, _, rest = rest.partition(".")
                key = f"{name}.{layers[int(number)]}.{rest}"
            weight.copy_(model.get_parameter(key))
    return made


class DraftModel(Drafter):
    num_drafts = 4

    def __init__(
        self, target: FrozenModel, spec: DraftSpec, tokenizer: PreTrainedTokenizerBase | None
    ) -> None:
        super().__init__()
        depth = target.num_layers
        layers = tuple(sorted({0, depth - 1})) if spec.layers is None else spec.layers
        if not layers or max(layers) >= depth:
            raise UserError(f"layers={list(layers)}: the target has layers 0 .. {depth - 1}")
        self.model, self._tokenizer = some_layers(target.model, layers), tokenizer
        self.model.to(target.device).eval()
        if not spec.train_embedding:
            for module in (self.model.get_input_embeddings(), self.model.get_output_embeddings()):
                module.requires_grad_(False)

    def loss(self, target: FrozenModel, batch: Batch, options: LossOptions) -> Tensor:
        tokens_BS = batch.tokens_BS
        b, t = chosen_rows(batch, 1, options)
        with torch.no_grad():
            last = target.residuals(tokens_BS)[target.num_layers][b, t]
        goal = goal_of(target, last, None, options)
        with target.autocast():
            logits = self.model(input_ids=tokens_BS, use_cache=False).logits[b, t]
        return goal.loss(logits, tokens_BS[b, t + 1], slice(None))

    @torch.no_grad()
    def right(self, target: FrozenModel, tokens_T: Tensor) -> dict[str, Tensor]:
        with target.autocast():
            logits = self.model(input_ids=tokens_T[None], use_cache=False).logits[0]
        return {"draft": drafted_one_by_one(logits.argmax(-1), tokens_T, self.num_drafts)}

    def save(self, folder: Path) -> None:
        """Writes a transformers model folder in bfloat16, with the target's tokenizer if given."""
        stored = copy.deepcopy(self.model).to("cpu", torch.bfloat16)
        stored.save_pretrained(folder)
        if self._tokenizer is not None:
            self._tokenizer.save_pretrained(folder)
