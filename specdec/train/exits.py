"""Heads that read a frozen model's residual stream: early exits and Medusa heads.

Shape letters as in model.py, and N = B S positions. A head of offset d predicts the token that is
d positions further on than the next one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save
from torch import Tensor, nn

from specdec.errors import UserError
from specdec.files import write_bytes
from specdec.train.keys import made_of
from specdec.train.lm import Loss
from specdec.train.model import LanguageModel, rms_norm


class HeadKind(StrEnum):
    """What stands between the residual stream and the head's logits.

    ``NORM``: a norm (PPSD 5.3). ``TRANSFORMER``: a decoder layer of the target's own shape and a
    norm (PPSD 5.3). ``MEDUSA``: a norm and a residual block of one linear layer (Medusa, arXiv
    2401.10774, 2.1).
    """

    NORM = "norm"
    TRANSFORMER = "transformer"
    MEDUSA = "medusa"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpec:
    """One head.

    Attributes:
        kind: see ``HeadKind``.
        layer: layers of the target before it.
        offset: positions beyond the next token; 0 for an early exit.
        own_output: whether it has an output matrix of its own, or uses the target's.
    """

    kind: HeadKind
    layer: int
    offset: int = 0
    own_output: bool = True

    @property
    def name(self) -> str:
        """Of its file, without ending: ``transformer-3``, ``medusa-24-1``."""
        return f"{self.kind}-{self.layer}" + (f"-{self.offset}" if self.offset else "")

    @staticmethod
    def of(values: dict[str, object]) -> HeadSpec:
        """From plain values.

        Raises:
            UserError: for an unknown kind or key, or a negative offset.
        """
        kinds = list(HeadKind)
        if values.get("kind") not in kinds:
            raise UserError(f"heads: {values} has none of the kinds {', '.join(kinds)}")
        spec = made_of(HeadSpec, {**values, "kind": HeadKind(str(values["kind"]))}, "heads")
        if spec.offset < 0 or spec.layer < 1:
            raise UserError(f"heads: {values}: layer must be at least 1, offset at least 0")
        return spec


class ExitHead(nn.Module):
    """A head's weights, under the names of its file."""

    def __init__(self, spec: HeadSpec, target: LanguageModel) -> None:
        """Starts from the target's own last layer, final norm and output matrix.

        Raises:
            UserError: the target has not so many layers.
        """
        super().__init__()
        depth = target.shape.num_layers
        if spec.layer > depth:
            raise UserError(f"head {spec.name}: the target has {depth} layers only")
        self.spec = spec
        self.norm = copy.deepcopy(target.model.norm)
        if spec.kind is HeadKind.TRANSFORMER:
            self.layer = copy.deepcopy(target.model.layers[-1])
        if spec.kind is HeadKind.MEDUSA:
            self.block = nn.Linear(target.shape.hidden, target.shape.hidden, bias=False)
            nn.init.zeros_(self.block.weight)
        if spec.own_output:
            self.output = nn.Linear(target.shape.hidden, target.shape.vocab_size, bias=False)
            self.output.weight.data.copy_(target.model.embed_tokens.weight.data)
        self.requires_grad_(True)

    def last_hidden(self, target: LanguageModel, x_BSE: Tensor) -> Tensor:
        """What the output matrix is applied to, (B, S, E) in the target's compute dtype."""
        if self.spec.kind is HeadKind.TRANSFORMER:
            x_BSE = target.run_layer(self.layer, x_BSE)
        h = rms_norm(x_BSE, self.norm.weight).to(target.dtype)
        if self.spec.kind is HeadKind.MEDUSA:
            h = h + F.silu(F.linear(h, self.block.weight.to(target.dtype)))
        return h

    def matrix(self, target: LanguageModel) -> Tensor:
        """The output matrix, (V, E)."""
        weight = self.output.weight if self.spec.own_output else target.model.embed_tokens.weight
        return weight.to(target.dtype)

    def logits(self, target: LanguageModel, x_BSE: Tensor) -> Tensor:
        """Logits, (B, S, V) float32, of the residual stream after ``spec.layer`` layers."""
        return F.linear(self.last_hidden(target, x_BSE), self.matrix(target)).float()


class ExitHeads(nn.Module):
    """Heads of one target, trained together on one pass of it; a model for ``lm.Pretraining``."""

    def __init__(self, target: LanguageModel, specs: Sequence[HeadSpec]) -> None:
        """Makes the heads.

        Raises:
            UserError: two heads of one name, or a layer that the target has not.
        """
        super().__init__()
        names = [spec.name for spec in specs]
        if not names or len(set(names)) != len(names):
            raise UserError(f"heads must be named once each, got {names}")
        self.shape = target.shape
        self.heads = nn.ModuleDict({spec.name: ExitHead(spec, target) for spec in specs})

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self.heads.values())

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.parameters()).device


def exit_loss(
    h_NE: Tensor, matrix_VE: Tensor, log_target_NV: Tensor, labels_N: Tensor, kl_weight: float
) -> Tensor:
    """PPSD D.1: L = lambda KL(teacher || head) + H(head, label), mean nats per position."""
    log_head_NV = F.log_softmax(F.linear(h_NE, matrix_VE).float(), dim=-1)
    kl = (log_target_NV.exp() * (log_target_NV - log_head_NV)).sum(-1).mean()
    return kl_weight * kl + F.nll_loss(log_head_NV, labels_N)


class SelfDistillation(Loss):
    """Loss for ``lm.Pretraining``: each head learns the frozen target's own distribution.

    A head of offset d is taught the target's distribution d positions further on, and the text's
    token there. The loss is the mean over the heads.
    """

    def __init__(
        self,
        target: LanguageModel,
        *,
        kl_weight: float = 1.0,
        temperature: float = 1.0,
        every: int = 1,
        compiled: bool = False,
    ) -> None:
        """Takes the frozen target and the loss's settings.

        Args:
            target: the teacher.
            kl_weight: lambda.
            temperature: of both distributions, the label's term included (1 in the paper); below 1
                the likeliest tokens, which a verifier looks at, count for more.
            every: one position in so many is in the loss, others from step to step; the matrix of
                the vocabulary is most of a small model's work. 1 in the paper.
            compiled: torch.compile of the loss.

        Raises:
            UserError: a value out of range.
        """
        if kl_weight < 0 or temperature <= 0 or every < 1:
            raise UserError(
                f"kl_weight={kl_weight} must be at least 0, temperature={temperature} above 0 and"
                f" every={every} at least 1"
            )
        self.target, self.kl_weight = target.requires_grad_(False), kl_weight
        self.temperature, self.every = temperature, every
        self._calls = 0
        self.exit_loss: Callable[..., Tensor] = exit_loss
        if compiled:
            self.exit_loss = torch.compile(exit_loss, dynamic=False)

    def __call__(self, heads: ExitHeads, inputs_BS: Tensor, targets_BS: Tensor) -> Tensor:
        """Scalar loss in nats per token."""
        target, depth, length = self.target, self.target.shape.num_layers, inputs_BS.shape[1]
        most = max(head.spec.offset for head in heads)
        if length - most < self.every:
            raise UserError(
                f"sequences of {length} positions are too short for offset={most} and"
                f" every={self.every}"
            )
        at = torch.arange(self._calls % self.every, length - most, self.every)
        self._calls += 1
        teachers: dict[int, Tensor] = {}  # by offset; heads of one offset share it
        with torch.no_grad():
            streams = target.residuals(inputs_BS, {head.spec.layer for head in heads})
            for offset in {head.spec.offset for head in heads}:
                logits_BSV = target.logits(streams[depth][:, at + offset]) / self.temperature
                teachers[offset] = F.log_softmax(logits_BSV, dim=-1).flatten(0, 1)
        losses = [
            self.exit_loss(
                head.last_hidden(target, streams[head.spec.layer])[:, at].flatten(0, 1),
                head.matrix(target) / self.temperature,
                teachers[head.spec.offset],
                targets_BS[:, at + head.spec.offset].flatten(),
                self.kl_weight,
            )
            for head in heads
        ]
        return torch.stack(losses).mean()

    def state(self) -> dict[str, int]:
        """Steps so far, which choose the positions."""
        return {"calls": self._calls}

    def restore(self, state: dict[str, int]) -> None:
        """Returns to a position that ``state`` gave."""
        self._calls = state["calls"]


@torch.no_grad()
def warm_start(
    target: LanguageModel, heads: ExitHeads, batches: Iterable[Tensor], *, ridge: float = 1e-3
) -> None:
    """Sets each own output matrix to the target's after the best linear map into its last state.

    The map is ridge regression from what the head's output matrix sees to what the target's sees at
    the position that the head predicts from. One pass of the target; no gradients.

    Args:
        target: the frozen target.
        heads: of it, before training; those without an own output matrix stay as they are.
        batches: int64 (B, S) token ids each.
        ridge: added to the diagonal, as a share of its mean.
    """
    depth, width = target.shape.num_layers, target.shape.hidden
    own = [head for head in heads if head.spec.own_output]
    sums = [(torch.zeros(width, width), torch.zeros(width, width)) for _ in own]
    for tokens_BS in batches:
        streams = target.residuals(tokens_BS.to(target.device), {h.spec.layer for h in own})
        last_BSE = rms_norm(streams[depth], target.model.norm.weight)
        for head, (inner, cross) in zip(own, sums, strict=True):
            offset, length = head.spec.offset, tokens_BS.shape[1]
            x_NE = head.last_hidden(target, streams[head.spec.layer])[:, : length - offset]
            x_NE = x_NE.float().flatten(0, 1)
            inner += (x_NE.T @ x_NE).cpu()
            cross += (x_NE.T @ last_BSE[:, offset:].flatten(0, 1)).cpu()
    for head, (inner, cross) in zip(own, sums, strict=True):
        diagonal = ridge * inner.diagonal().mean() * torch.eye(width)
        map_EE = torch.linalg.solve(inner + diagonal, cross).to(target.device)
        head.output.weight.copy_(target.model.embed_tokens.weight @ map_EE.T)


def save_heads(heads: ExitHeads, folder: Path) -> None:
    """Writes one safetensors file (bfloat16) per head; its metadata says what it is."""
    for head in heads:
        weights = {
            name: value.detach().to("cpu", torch.bfloat16).contiguous()
            for name, value in head.state_dict().items()
        }
        about = {key: str(value) for key, value in asdict(head.spec).items()}
        data = save(weights, metadata={"format": "pt", **about})
        write_bytes(folder / f"{head.spec.name}.safetensors", data)
