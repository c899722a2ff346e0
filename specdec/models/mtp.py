"""Multi-token-prediction (MTP) heads inside a target, used to draft as with EAGLE's heads.

DeepSeek-V3 (arXiv 2412.19437, section 2.2): the row for the token at position p is ``eh_proj`` of
[enorm(embedding); hnorm(state)], where the state is the target's hidden state of position p - 1
after its final norm. One layer of the target's own type, a norm and the target's output matrix
follow. Chains of drafts apply the first MTP layer again and again to its own output; further MTP
layers of a checkpoint are not used. transformers' ``MtpModel`` loads the layers.

Shape letters: B sequences, T tokens, E hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from specdec.errors import UserError
from specdec.models.eagle import ATTENTION, Attend, EagleConfig, causal
from specdec.models.eagle_loading import fit_head, untrained_config
from specdec.models.slicing import shared_copy


class MtpHead(nn.Module):
    """Drafts with the target's first MTP layer; attributes and methods are as in ``EagleHead``."""

    target_ids: Tensor | None = None
    shared_output_bytes: int

    def __init__(self, mtp: MtpModel, config: EagleConfig) -> None:
        super().__init__()
        self.config, self.layer = config, mtp.layers[0]
        self.layer.config._attn_implementation = ATTENTION
        self.norm = mtp.shared_post_norm if mtp.use_shared_post_norm else nn.Identity()
        self.rotary = mtp.rotary_emb
        self._typed = {"layer_type": mtp.config.layer_types[0]} if mtp.has_per_layer_rope else {}
        # In a tuple: the target's modules are not stored with the head.
        self._target = (mtp.embed_tokens, mtp._project_to_logits, mtp.shared_head)
        self.shared_output_bytes = sum(p.nbytes for p in mtp.shared_head.parameters())

    @property
    def fc(self) -> nn.Linear:
        return self.layer.eh_proj  # type: ignore[no-any-return]

    def shared_copy(self) -> MtpHead:
        """Returns the head itself, since passes do not change it."""
        return self

    def states(self, features: Tensor) -> Tensor:
        return features

    def forward(
        self, tokens: Tensor, states: Tensor, positions: Tensor, attend: Attend = causal
    ) -> Tensor:
        """Returns outputs [B, T, E]; arguments: see ``EagleHead``. Rotates by ``positions`` + 1."""
        embedded = self._target[0](tokens)
        places = positions + 1
        rotation = None
        if self.rotary is not None:
            rotation = self.rotary(embedded, position_ids=places, **self._typed)
        out: Tensor = self.norm(
            self.layer(
                embedded,
                states,
                position_embeddings=rotation,
                attention_mask=None,
                position_ids=places,
                past_key_values=None,
                attend=lambda _, *args: attend(0, *args),
            )
        )
        return out

    def logits(self, outputs: Tensor) -> Tensor:
        logits: Tensor = self._target[1](outputs)
        return logits

    def fed_back(self, outputs: Tensor) -> Tensor:
        return outputs

    def target_logits(self, logits: Tensor) -> Tensor:
        return logits


def mtp_head(pair: Any) -> MtpHead:
    """Loads the target's MTP layer; for a random target, makes one and trains it on the target.

    Raises:
        UserError: the target has no MTP layer, or it cannot be read.
    """
    target: PreTrainedModel = pair.target
    text = target.config.get_text_config()
    if getattr(text, "num_mtp_layers", None):
        try:
            loaded = MtpModel.from_pretrained(target)
        except (RuntimeError, ValueError, OSError) as error:
            raise UserError(f"the target's MTP layers cannot be read: {error}") from error
        return _head(loaded, target)
    head, fitted = pair.fitted("mtp", lambda: _head(_untrained(target), target), fit_head)
    if not fitted:
        raise UserError(
            f"a target of model_type {text.model_type!r} without MTP layers (num_mtp_layers,"
            " num_nextn_predict_layers) cannot draft with them: choose another source"
        )
    return head  # type: ignore[no-any-return]


def _untrained(target: PreTrainedModel) -> MtpModel:
    described = shared_copy(target)
    described.config = copy.deepcopy(target.config)
    text = described.config.get_text_config()
    text.num_mtp_layers = 1
    if getattr(text, "layer_types", None):
        text.mtp_layer_types = ["full_attention"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MtpModel(described, 1)


def _head(mtp: MtpModel, target: PreTrainedModel) -> MtpHead:
    config = untrained_config(1, target.config)
    head = MtpHead(mtp, config).to(target.device, target.dtype)
    return head.requires_grad_(False).eval()
