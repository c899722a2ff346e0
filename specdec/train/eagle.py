"""Trains EAGLE-3 heads by training-time test: their outputs are fed back for several steps.

Shape letters: B windows, S positions, A rows in the loss, E hidden size, F feature size, U draft
vocabulary.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.errors import UserError
from specdec.models.config_values import config_value
from specdec.models.eagle import EagleConfig, EagleHead
from specdec.models.eagle_loading import HeadFiles, load_head, save_head, untrained_config
from specdec.models.eagle_unroll import unroll
from specdec.models.frozen import FrozenModel
from specdec.parts.fields import Count, PositiveShare, Text, validated
from specdec.train.drafter import Drafter, OutputOptions, check_layers, goal_of
from specdec.train.losses import LossOptions
from specdec.train.texts import Batch

_STD = 0.02  # of the initial matrices


@validated
@dataclass(frozen=True, slots=True, kw_only=True)
class EagleSpec:
    """Options for training an EAGLE-3 head.

    Attributes:
        steps, decay: steps of the training-time test; step i has the weight decay ** i in the loss.
        layers: numbers of target layers after which states are read; None: 2, L // 2, L - 3 of L.
        feed_forward: inner width of the head's MLP; None: that of the target's MLP.
        norm_before_residual, fc_norm, norm_output: variants of the head, see ``EagleConfig``.
    """

    steps: Count = 7
    decay: PositiveShare = 0.8
    layers: tuple[Count, ...] | None = None
    feed_forward: Count | None = None
    norm_before_residual: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    initial: Text | None = None  # folder of a head to begin with; None: a new head


def head_config(target: FrozenModel, spec: EagleSpec, own_output: bool, size: int) -> EagleConfig:
    """Returns a new head's config: ``size`` draft tokens, an output matrix if ``own_output``."""
    width = target.get_input_embeddings().weight.shape[1]
    if width != target.hidden_size:
        raise UserError(
            f"the target's embeddings have width {width}, its hidden states {target.hidden_size}:"
            " an EAGLE-3 head needs equal widths"
        )
    check_layers(spec.layers, target)
    rope = config_value(target.config, "rope_parameters", {})
    layer: dict[str, Any] = {}
    variants = {
        key: getattr(spec, key) for key in ("norm_before_residual", "fc_norm", "norm_output")
    }
    if "rope_theta" in rope:  # not with learned positions, or frequencies by kind of layer
        layer["rope_parameters"] = rope
    if spec.layers is not None:
        variants["layers"] = tuple(layer - 1 for layer in spec.layers)
    if spec.feed_forward is not None:
        layer["intermediate_size"] = spec.feed_forward
    return untrained_config(
        3, target.config, layer=layer, own_output=own_output, draft_vocab_size=size, **variants
    )


def new_head(target: FrozenModel, config: EagleConfig, ids: Tensor | None, seed: int) -> EagleHead:
    """Creates a head with the target's final norm and output matrix (if ``ids``, only these rows of
    it). The other matrices are drawn from a normal distribution with deviation ``_STD``.
    """
    embedding, output = target.get_input_embeddings().weight, target.get_output_embeddings()
    head = EagleHead(config, embedding=embedding.float(), output=output)
    head.target_ids = ids
    generator = torch.Generator().manual_seed(seed)
    for weight in head.parameters():
        if weight.dim() == 2:
            nn.init.normal_(weight, std=_STD, generator=generator)
    with torch.no_grad():
        signs_E = torch.ones(config.layer.hidden_size, device=target.device)
        signs_E[::2] = -1.0  # mean 0, square 1: RMS and layer norms only scale it
        head.norm.weight.copy_(target.norm(signs_E.to(output.weight.dtype)) * signs_E)
        if config.own_output:
            rows = output.weight.cpu()
            head.lm_head.weight.copy_(rows if ids is None else rows[ids.cpu()])
    return head.to(target.device)


def stored_head(target: FrozenModel, folder: Path) -> EagleHead:
    files = HeadFiles(folder)
    embedding, output = target.get_input_embeddings().weight, target.get_output_embeddings()
    config = files.head_config(target.config)
    return load_head(files, config, embedding=embedding.float(), output=output)


class EagleDrafter(Drafter):
    def __init__(
        self,
        target: FrozenModel,
        spec: EagleSpec,
        options: OutputOptions,
        ids: Tensor | None,
        seed: int,
    ) -> None:
        super().__init__()
        own = options.matrix == "own" or ids is not None
        size = target.vocab_size if ids is None else len(ids)
        config = head_config(target, spec, own, size)
        if spec.initial is None:
            self.head = new_head(target, config, ids, seed)
        else:
            self.head = stored_head(target, Path(spec.initial))
            _refuse_other(self.head.config, config, spec.initial)
        self.head.requires_grad_(True)
        if own and options.matrix == "shared":
            self.head.lm_head.requires_grad_(False)
        self.spec, self.num_drafts = spec, spec.steps
        self.layers = frozenset(layer + 1 for layer in self.head.config.layers)

    def features(self, streams: dict[int, Tensor]) -> Tensor:
        return torch.cat([streams[layer + 1] for layer in self.head.config.layers], -1)

    def loss(self, target: FrozenModel, batch: Batch, options: LossOptions) -> Tensor:
        """Returns the loss. Output i of step s learns target probabilities of token i + 2 + s."""
        head, steps, length = self.head, self.spec.steps, batch.tokens_BS.shape[1]
        tokens_BS = F.pad(batch.tokens_BS, (0, steps - 1))  # all steps then have the same rows
        counts_BS = F.pad(batch.counts_BS, (0, steps + 1))
        with torch.no_grad():
            streams = target.residuals(tokens_BS, self.layers)
        # The first row that predicts a token that counts, in any window.
        first = max(0, int(counts_BS.any(0).nonzero()[0]) - 2)
        rows_A = torch.arange(
            first + batch.step % options.every, length - 1, options.every, device=tokens_BS.device
        )
        if not len(rows_A):
            rows_A = torch.tensor([first], device=tokens_BS.device)
        weights = [self.spec.decay**number for number in range(steps)]
        total = tokens_BS.new_zeros((), dtype=torch.float32)
        # A position is a goal of several steps: its distribution is computed once.
        learnt_BS = torch.zeros_like(counts_BS[:, :-1])
        at_SA = rows_A + 1 + torch.arange(steps, device=rows_A.device)[:, None]
        learnt_BS[:, at_SA.flatten()] = counts_BS[:, at_SA.flatten() + 1]
        row_BS = learnt_BS.flatten().cumsum(0).view_as(learnt_BS) - 1  # of the goal
        last_NE = streams[target.num_layers][learnt_BS[:, : tokens_BS.shape[1]]]
        with target.autocast():
            goal = goal_of(target, last_NE, head.target_ids, options)
            outputs_of = unroll(head, tokens_BS, self.features(streams), steps, rows_A)
            for number, outputs in enumerate(outputs_of):
                outputs = outputs[:, rows_A] if number == 0 else outputs
                at_A = at_SA[number]
                b, a = counts_BS[:, at_A + 1].nonzero(as_tuple=True)
                if not len(b):
                    continue
                labels, rows = tokens_BS[b, at_A[a] + 1], row_BS[b, at_A[a]]
                loss = goal.loss(head.logits(outputs[b, a]), labels, rows)
                total = total + weights[number] * loss
        return total / sum(weights)

    @torch.no_grad()
    def right(self, target: FrozenModel, tokens_T: Tensor) -> dict[str, Tensor]:
        """Implements ``Drafter.right``: output t - 1 of step k (from 0) drafts token t + 1 + k."""
        length, steps = len(tokens_T), self.spec.steps
        padded = F.pad(tokens_T[None], (0, steps))
        features = self.features(target.residuals(padded, self.layers))
        right = torch.zeros(steps, length, dtype=torch.bool, device=tokens_T.device)
        with target.autocast():
            for k, outputs in enumerate(unroll(self.head, padded, features, steps)):
                logits = self.head.logits(outputs[0, : length - 1]).float()
                drafted = self.head.target_logits(logits).argmax(-1)  # row t - 1: token t + 1 + k
                last = length - 1 - k
                right[k, 1:last] = drafted[: last - 1] == tokens_T[2 + k :]
        return {"eagle3": right}

    def save(self, folder: Path) -> None:
        config = self.head.config
        stored = EagleHead(config, embedding=torch.empty(0), output=nn.Identity()).bfloat16()
        stored.load_state_dict(
            {name: weight.detach() for name, weight in self.head.named_parameters()}, strict=False
        )
        stored.target_ids = self.head.target_ids
        save_head(stored, folder)


def _refuse_other(stored: EagleConfig, config: EagleConfig, folder: str) -> None:
    wanted = {**asdict(config), **config.layer.to_dict(), "layer": None}
    found = {**asdict(stored), **stored.layer.to_dict(), "layer": None}
    different = [f"{k} is {v}, not {wanted[k]}" for k, v in found.items() if wanted[k] != v]
    if different:
        raise UserError(f"initial={folder} has another head ({'; '.join(different)})")
