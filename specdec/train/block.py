"""Trains block drafters (DFlash, DSpark) on blocks at random positions (anchors) of the answers.

Shape letters: B windows, S positions, N anchors, M draft tokens of a block, E hidden size.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.errors import UserError
from specdec.models.block import Kind, confidence_loss, save_block, untrained_block
from specdec.models.frozen import FrozenModel
from specdec.parts.fields import Count, Index, PositiveShare, validated
from specdec.train.drafter import Drafter, OutputOptions, check_layers, goal_of
from specdec.train.losses import LossOptions
from specdec.train.texts import Batch

_CHUNK = 32  # anchors per pass when agreement is measured


@validated
@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpec:
    """Options for training a block drafter.

    Attributes:
        block: positions of a block; DSpark drafts as many tokens, DFlash one less.
        anchors: largest number of blocks that a training step takes from each text window.
        decay: the loss at a block's draft token k (from 0) has the weight decay ** k.
        mask_token: input token at the positions to draft; None: the vocabulary's last token.
        layers: numbers of target layers after which states are read; None: five, evenly spread.
        feed_forward: inner width of the drafter's MLP; None: that of the target's MLP.
    """

    kind: Kind = "dflash"
    block: Count = 8
    num_layers: Count = 2
    anchors: Count = 32
    decay: PositiveShare = 0.8
    mask_token: Index | None = None
    layers: tuple[Count, ...] | None = None
    feed_forward: Count | None = None


class BlockDrafter(Drafter):
    def __init__(
        self, target: FrozenModel, spec: BlockSpec, options: OutputOptions, ids: Tensor | None
    ) -> None:
        super().__init__()
        variants: dict[str, Any] = {"block_size": spec.block, "num_layers": spec.num_layers}
        if spec.layers is not None:
            check_layers(spec.layers, target)
            variants["layers"] = tuple(layer - 1 for layer in spec.layers)
        if spec.mask_token is not None:
            variants["mask_token"] = spec.mask_token
        if ids is None and options.matrix == "own":
            raise UserError(
                "output.matrix=own: a block drafter has one with output.vocabulary=SIZE"
            )
        output = target.get_output_embeddings()
        head = untrained_block(
            spec.kind,
            target.config,
            embedding=target.get_input_embeddings().weight.float(),
            output=output,
            feed_forward=spec.feed_forward,
            draft_vocab_size=target.vocab_size if ids is None else len(ids),
            **variants,
        )
        self.head, self.spec = head.requires_grad_(True), spec
        if ids is not None:
            head.target_ids = ids
            with torch.no_grad():
                head.lm_head.weight.copy_(output.weight[ids.to(output.weight.device)])
            head.lm_head.requires_grad_(options.matrix == "own")
        self.num_drafts = head.config.num_drafts
        self.layers = frozenset(layer + 1 for layer in head.config.layers)

    def features(self, target: FrozenModel, streams: dict[int, Tensor]) -> Tensor:
        """Concatenates the states to read, [B, S, F]; ``streams``: number of layers -> states."""
        states = [(name, streams[name.layer + 1]) for name in self.head.config.names]
        return torch.cat([target.norm(x).float() if n.normed else x for n, x in states], -1)

    def rows(self, features: Tensor, tokens_BS: Tensor, anchors_N: Tensor) -> Tensor:
        """Returns the drafter's last hidden states for each block's draft tokens, [B, N, M, E]."""
        places = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        rows: Tensor = self.head(
            tokens_BS[:, anchors_N], anchors_N, self.head.context(features, places)
        )
        return rows

    def loss(self, target: FrozenModel, batch: Batch, options: LossOptions) -> Tensor:
        """Returns the loss. Draft k of anchor a learns target probabilities of token a + 1 + k."""
        tokens_BS, counts_BS = batch.tokens_BS, batch.counts_BS
        drafts, length = self.num_drafts, tokens_BS.shape[1]
        with torch.no_grad():
            streams = target.residuals(tokens_BS, self.layers)
            features = self.features(target, streams)
        useful = counts_BS[:, 2:].any(0).nonzero()[:, 0] + 1  # anchors before a token that counts
        if not len(useful):
            useful = torch.tensor([1], device=tokens_BS.device)
        generator = torch.Generator().manual_seed(batch.step)
        chosen = torch.randperm(len(useful), generator=generator)[: self.spec.anchors]
        anchors_N = useful[chosen.sort().values.to(useful.device)]
        ahead_NM = anchors_N[:, None] + torch.arange(1, drafts + 1, device=tokens_BS.device)
        inside_NM = ahead_NM < length
        ahead_NM = ahead_NM.clamp(max=length - 1)
        b, n, k = (counts_BS[:, ahead_NM].bool() & inside_NM).nonzero(as_tuple=True)
        if len(b) > options.every:
            b, n, k = (part[batch.step % options.every :: options.every] for part in (b, n, k))
        place = ahead_NM[n, k]  # of the predicted tokens
        # Blocks overlap: the target's distribution of a token is computed once.
        places, row = torch.unique(b * length + place, return_inverse=True)
        last_PE = streams[target.num_layers].flatten(0, 1)[places - 1]
        with target.autocast():
            goal = goal_of(target, last_PE, self.head.target_ids, options)
            rows = self.rows(features, tokens_BS, anchors_N)
            total, weights = rows.sum() * 0.0, 0.0
            for number in range(drafts):
                weight, at = self.spec.decay**number, k == number
                if not bool(at.any()):
                    continue
                before, labels = tokens_BS[b[at], place[at] - 1], tokens_BS[b[at], place[at]]
                chosen_rows = rows[b[at], n[at], number]
                logits = self.head.logits(chosen_rows, before)
                loss = goal.loss(logits, labels, row[at])
                if self.head.config.confidence:
                    drafted = (logits.float() / options.temperature).softmax(-1)
                    wanted = goal.probs(row[at])
                    loss = loss + confidence_loss(self.head, chosen_rows, before, wanted, drafted)
                total, weights = total + weight * loss, weights + weight
        return total / max(weights, 1.0)

    @torch.no_grad()
    def right(self, target: FrozenModel, tokens_T: Tensor) -> dict[str, Tensor]:
        """Implements ``Drafter.right``: the block of root t drafts tokens t + 1 .. t + M."""
        length, drafts = len(tokens_T), self.num_drafts
        features = self.features(target, target.residuals(tokens_T[None], self.layers))
        padded = torch.cat([tokens_T, tokens_T.new_zeros(drafts)])
        right = torch.zeros(drafts, length, dtype=torch.bool, device=tokens_T.device)
        steps = torch.arange(drafts, device=tokens_T.device)
        with target.autocast():
            for anchors_N in torch.arange(1, length, device=tokens_T.device).split(_CHUNK):
                rows = self.rows(features, tokens_T[None], anchors_N)[0]
                before = padded[anchors_N[:, None] + steps]
                logits = self.head.target_logits(self.head.logits(rows, before))
                drafted = logits.argmax(-1)
                right[:, anchors_N] = (drafted == padded[anchors_N[:, None] + 1 + steps]).T
        return {self.spec.kind: right}

    def save(self, folder: Path) -> None:
        save_block(self.head, folder)
