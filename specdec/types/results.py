"""Results of the target.

Shape letters: W nodes, A answered nodes, V vocabulary, T tokens, E hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from specdec.device import Probs
from specdec.types.arrays import IntArray
from specdec.types.needs import HiddenName
from specdec.types.nodes import Candidates

NO_TOKEN = -1
"""Stands in ``Answers.tokens`` for an answer that is not needed: its node is not on the target's
path.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The target's next tokens after nodes of one request.

    Attributes:
        tokens: int64[A], the target's own next token after each node, by its keyed draw;
            ``NO_TOKEN`` for nodes that are not on the target's path (``Needs.all_answers``).
        probs: float64[A, V], distributions after sampling transforms; None unless a part needs
            them.
        hidden: name -> [A, E], in the target's dtype, on its device or the host; empty unless a
            part needs them.
    """

    request: int
    node_ids: IntArray
    tokens: IntArray
    probs: Probs | None = None
    hidden: Mapping[HiddenName, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exits:
    """Proposals of one exit head for nodes of one request (PPSD Alg. 1, lines 13 and 29).

    ``candidates`` has one row per node; ``layer`` is the number of layers before the exit.
    """

    request: int
    node_ids: IntArray
    candidates: Candidates
    layer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptHidden:
    """Hidden states, name -> [T, E], of a prefill chunk that begins at position ``start``.

    They have the target's dtype and are on its device.
    """

    request: int
    start: int
    hidden: Mapping[HiddenName, torch.Tensor]

    @property
    def last_position(self) -> int:
        return self.start + len(next(iter(self.hidden.values()))) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyHidden:
    """Hidden states, name -> [W, E], of nodes of one request that may not be answered yet.

    They have the target's dtype and are on its device or the host.
    """

    request: int
    node_ids: IntArray
    hidden: Mapping[HiddenName, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The results of an executor in one step.

    Attributes:
        answers: answers that arrived in this step, possibly of earlier batches. A request may occur
            more than once.
        exits: proposals for nodes that passed an exit layer in this step, on any stage.
        prompts: hidden states of prefill chunks. ``Needs.hidden`` arrive when the chunk leaves the
            target and ``Needs.early_hidden`` when it has passed the layer, as separate entries.
        early: ``Needs.early_hidden`` of nodes that passed the layer in this step.
    """

    step: int
    answers: tuple[Answers, ...] = ()
    exits: tuple[Exits, ...] = ()
    prompts: tuple[PromptHidden, ...] = ()
    early: tuple[EarlyHidden, ...] = ()
