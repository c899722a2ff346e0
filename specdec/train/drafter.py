"""Base class of drafters to train; their output matrices, vocabularies and target distributions.

Shape letters: B windows, S positions, T = S tokens of one text, K draft tokens, N rows, E hidden
size, V vocabulary, U draft vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.errors import UserError
from specdec.models.frozen import FrozenModel
from specdec.parts.fields import Count, validated
from specdec.train.losses import Goal, LossOptions
from specdec.train.texts import Batch


class Drafter(nn.Module, ABC):
    """Base class of drafters to train; the target is an argument of methods, not a submodule."""

    name = ""  # its record is ``training-NAME.json``, or ``training.json`` if empty
    layers: frozenset[int] = frozenset()  # it reads the target's states after so many layers
    num_drafts = 1  # K, draft tokens per root in ``right``

    @abstractmethod
    def loss(self, target: FrozenModel, batch: Batch, options: LossOptions) -> Tensor:
        """Returns the loss over the batch's answer tokens (those with ``Batch.counts_BS``)."""

    @abstractmethod
    def right(self, target: FrozenModel, tokens_T: Tensor) -> Mapping[str, Tensor]:
        """Returns name -> bool[K, T]: whether draft token k (from 0) of root t is token t + 1 + k.

        Token k is drafted as if the draft tokens before it were right (teacher forcing), after the
        target has computed the tokens before the root. Entries whose token is beyond the text are
        arbitrary. Independent heads have an entry each, under their own name.
        """

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Writes the drafter's files, which the library's loaders read."""


@validated
@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """Options of a drafter's output matrix: the section ``output`` of a training configuration."""

    # "shared": the target's output matrix, or its rows for ``vocabulary``, neither stored nor
    # trained; "own": every head trains a copy.
    matrix: Literal["shared", "own"] = "shared"
    # Number of tokens that can be drafted, the most frequent in the training answers; None: all.
    vocabulary: Count | None = None


class OutputMatrix(nn.Module):
    """The output matrix of a head: the target's, some of its rows, or a trained copy."""

    def __init__(self, target: FrozenModel, options: OutputOptions, ids: Tensor | None) -> None:
        super().__init__()
        self.module = (target.get_output_embeddings(),)  # in a tuple: it is no module of the head
        self.own = options.matrix == "own"
        self.ids: Tensor | None
        self.register_buffer("ids", ids, persistent=False)
        self.weight: Tensor | None = None
        if ids is None and not self.own:
            return
        rows = self.module[0].weight.detach().float()
        rows = rows.clone() if ids is None else rows[ids.to(rows.device)]
        self.weight = nn.Parameter(rows, requires_grad=self.own)

    def forward(self, hidden: Tensor) -> Tensor:
        """Maps hidden states [N, E] to logits [N, U]."""
        weight = self.weight
        logits: Tensor = self.module[0](hidden) if weight is None else F.linear(hidden, weight)
        return logits

    def token(self, hidden: Tensor) -> Tensor:
        """Returns the likeliest token of each row, int64[N], as ids of the whole vocabulary."""
        likeliest = self(hidden).argmax(-1)
        return likeliest if self.ids is None else self.ids[likeliest]


def draft_ids(
    counts: npt.NDArray[np.int64], options: OutputOptions, vocab_size: int
) -> Tensor | None:
    """Returns the draft vocabulary's tokens, int64[U], in rising order; None for all tokens.

    ``counts`` has how often each token occurs in the training answers.
    """
    size = options.vocabulary
    if size is None or size == vocab_size:
        return None
    if size > vocab_size:
        raise UserError(f"output.vocabulary={size}: the target has {vocab_size} tokens only")
    counts = np.pad(counts, (0, max(0, vocab_size - len(counts))))
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:size]))


def check_layers(layers: Sequence[int] | None, target: FrozenModel) -> None:
    if layers is None:
        return
    if not layers:
        raise UserError("layers=[]: name at least one number of target layers")
    if max(layers) > target.num_layers:
        raise UserError(f"layers={list(layers)}: the target has {target.num_layers} layers only")


def chosen_rows(batch: Batch, ahead: int, options: LossOptions) -> Sequence[Tensor]:
    """Returns window and position ``ahead`` tokens before each token in the loss, int64[N] each."""
    window, place = batch.counts_BS[:, ahead:].nonzero(as_tuple=True)
    first = batch.step % options.every
    return window[first :: options.every], place[first :: options.every]


def goal_of(target: FrozenModel, last_NE: Tensor, ids: Tensor | None, options: LossOptions) -> Goal:
    """Returns the target distributions to learn, computed from its last layer's outputs [N, E]."""
    with torch.no_grad():
        return Goal(target.logits(last_NE[:, None])[:, 0], ids, options)


def bfloat16_state(module: nn.Module, names: Mapping[str, str] | None = None) -> dict[str, Tensor]:
    """Returns a module's parameters in bfloat16 on the CPU; ``names``: parameter -> stored name."""
    return {
        (names or {}).get(name, name): weight.detach().to("cpu", torch.bfloat16).contiguous()
        for name, weight in module.named_parameters()
    }


def as_stored(drafter: nn.Module) -> None:
    """Rounds a drafter's weights to bfloat16, so that those measured equal those in its files."""
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.copy_(weight.bfloat16())
