"""Exit and Medusa heads, which read the target's states after one layer (PPSD D.1, Medusa 2.1).

Shape letters: see ``train.drafter``.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.models.exits import save_tensors, save_vocabulary
from specdec.models.frozen import FrozenModel
from specdec.parts.fields import Count, validated
from specdec.train.drafter import (
    Drafter,
    OutputMatrix,
    OutputOptions,
    bfloat16_state,
    check_layers,
    chosen_rows,
    goal_of,
)
from specdec.train.losses import Goal, LossOptions
from specdec.train.texts import Batch


class PaperSettings(NamedTuple):
    """Training settings of one kind of exit head in PPSD Table 4."""

    learning_rate: float
    batch: int
    epochs: int


STATED = {"norm": PaperSettings(2e-5, 16, 1), "transformer": PaperSettings(5e-4, 2, 2)}


@validated
@dataclass(frozen=True, slots=True, kw_only=True)
class ExitSpec:
    """Options for training exit heads. ``head``: "norm" (a norm alone) or "transformer" (a decoder
    layer of the target's kind, and a norm). ``layers``: the number of target layers before each
    head; None: a quarter and a half of all.
    """

    head: Literal["norm", "transformer"] = "transformer"
    layers: tuple[Count, ...] | None = None


@validated
@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaSpec:
    heads: Count = 4


class _Head(nn.Module):
    """One exit or Medusa head; its parameters have the names that the head's file uses."""

    def __init__(self, target: FrozenModel, kind: str, layer: int, offset: int) -> None:
        super().__init__()
        self.kind, self.number, self.offset = kind, layer, offset
        self.place = min(layer, target.num_layers - 1)  # layer index that ``layer`` runs as
        self.norm = copy.deepcopy(target.norm).float()
        if kind == "transformer":
            self.layer = copy.deepcopy(target.layers[self.place]).float()
            last, own = target.layers[-1].state_dict(), self.layer.state_dict()
            if {n: w.shape for n, w in last.items()} == {n: w.shape for n, w in own.items()}:
                self.layer.load_state_dict(last)  # not where layers differ in size
        if kind == "medusa":
            self.block = nn.Linear(target.hidden_size, target.hidden_size, bias=False)
            nn.init.zeros_(self.block.weight)
        self.requires_grad_(True)

    @property
    def file(self) -> str:
        return f"{self.kind}-{self.number}" + (f"-{self.offset}" if self.offset else "")

    def inner(self, target: FrozenModel, x_BSE: Tensor) -> Tensor:
        """Applies the head's decoder layer if it has one (kind transformer); returns [B, S, E]."""
        if self.kind == "transformer":
            return target.run_layer(self.layer, x_BSE, self.place)
        return x_BSE

    def forward(self, x_NE: Tensor) -> Tensor:
        """Maps rows of ``inner``'s result to inputs of the output matrix, [N, E] each."""
        h_NE: Tensor = self.norm(x_NE)
        return h_NE + F.silu(self.block(h_NE)) if self.kind == "medusa" else h_NE


class StreamHeads(Drafter):
    """Exit or Medusa heads that are trained together, on the same passes of the target."""

    def __init__(
        self,
        target: FrozenModel,
        specs: Sequence[tuple[str, int, int]],
        options: OutputOptions,
        ids: Tensor | None,
    ) -> None:
        """``specs``: (kind, target layers before it, offset) per head; offset 0: the next token."""
        super().__init__()
        check_layers([layer for _, layer, _ in specs], target)
        self.heads = [_Head(target, *spec) for spec in specs]
        count = len(specs) if options.matrix == "own" else 1
        outputs = [OutputMatrix(target, options, ids) for _ in range(count)]
        self.outputs = outputs if count > 1 else outputs * len(specs)
        self.modules_of_heads = nn.ModuleList([*self.heads, *outputs])
        self.layers = frozenset(layer for _, layer, _ in specs)
        self.name = self.heads[0].file

    def loss(self, target: FrozenModel, batch: Batch, options: LossOptions) -> Tensor:
        with torch.no_grad():
            streams = target.residuals(batch.tokens_BS, self.layers)
        losses: list[Tensor] = []
        goals: dict[int, Goal] = {}  # by offset
        with target.autocast():
            for head, output in zip(self.heads, self.outputs, strict=True):
                ahead = head.offset + 1
                b, t = chosen_rows(batch, ahead, options)
                if head.offset not in goals:
                    last = streams[target.num_layers][b, t + head.offset]
                    goals[head.offset] = goal_of(target, last, output.ids, options)
                hidden = head(head.inner(target, streams[head.number])[b, t])
                labels = batch.tokens_BS[b, t + ahead]
                losses.append(goals[head.offset].loss(output(hidden), labels, slice(None)))
        return torch.stack(losses).mean()

    @torch.no_grad()
    def predicted(self, target: FrozenModel, tokens_T: Tensor) -> dict[str, Tensor]:
        """Returns head's file name -> int64[T]: the token that it predicts from each position."""
        streams = target.residuals(tokens_T[None], self.layers)
        with target.autocast():
            return {
                head.file: output.token(head(head.inner(target, streams[head.number])[0]))
                for head, output in zip(self.heads, self.outputs, strict=True)
            }

    def save(self, folder: Path) -> None:
        for head, output in zip(self.heads, self.outputs, strict=True):
            tensors = bfloat16_state(head)
            if output.own:
                assert output.weight is not None
                tensors["output.weight"] = output.weight.detach().to("cpu", torch.bfloat16)
                if output.ids is not None:
                    tensors["output.ids"] = output.ids.int().cpu()
            about = {"kind": head.kind, "layer": head.number, "offset": head.offset}
            about |= {"own_output": output.own, "reduced": output.ids is not None}
            save_tensors(tensors, folder / f"{head.file}.safetensors", about)
        output = self.outputs[0]
        if output.ids is not None and not output.own:
            save_vocabulary(output.ids, folder)


class ExitDrafter(StreamHeads):
    num_drafts = 4

    def __init__(
        self, target: FrozenModel, spec: ExitSpec, options: OutputOptions, ids: Tensor | None
    ) -> None:
        depth = target.num_layers
        layers = tuple(sorted({max(1, depth // 4), max(1, depth // 2)}))
        if spec.layers is not None:
            layers = spec.layers
        super().__init__(target, [(spec.head, layer, 0) for layer in layers], options, ids)

    def right(self, target: FrozenModel, tokens_T: Tensor) -> dict[str, Tensor]:
        return {
            name: drafted_one_by_one(predicted_T, tokens_T, self.num_drafts)
            for name, predicted_T in self.predicted(target, tokens_T).items()
        }


class MedusaDrafter(StreamHeads):
    def __init__(
        self, target: FrozenModel, spec: MedusaSpec, options: OutputOptions, ids: Tensor | None
    ) -> None:
        heads = [("medusa", target.num_layers, number) for number in range(1, spec.heads + 1)]
        super().__init__(target, heads, options, ids)
        self.num_drafts = spec.heads

    def right(self, target: FrozenModel, tokens_T: Tensor) -> dict[str, Tensor]:
        """Implements ``Drafter.right``: head k >= 1 predicts token t + k from token t - 1."""
        rows = list(self.predicted(target, tokens_T).values())
        right_KT = torch.zeros_like(torch.stack(rows), dtype=torch.bool)
        for k, predicted_T in enumerate(rows, start=1):
            right_KT[k - 1, 1:-k] = predicted_T[: -k - 1] == tokens_T[1 + k :]
        return {"medusa": right_KT}


def drafted_one_by_one(predicted_T: Tensor, tokens_T: Tensor, num_drafts: int) -> Tensor:
    """Returns the bool[K, T] of ``Drafter.right``; ``predicted_T[t]`` is the prediction after t."""
    next_T = torch.zeros_like(tokens_T, dtype=torch.bool)
    next_T[:-1] = predicted_T[:-1] == tokens_T[1:]
    right = torch.zeros(num_drafts, len(tokens_T), dtype=torch.bool, device=tokens_T.device)
    for k in range(num_drafts):
        right[k, : len(tokens_T) - k] = next_T[k:]
    return right
