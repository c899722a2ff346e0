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
"""Instead of the target's token after a node that another token than the target's leads to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The target's next tokens after nodes of one request.

    Attributes:
        request: request id.
        node_ids: int64[A].
        tokens: int64[A], the target's own next token after each node, by its keyed draw;
            ``NO_TOKEN`` after nodes that are not on the target's path (``Needs.all_answers``).
        probs: float64[A, V], processed target distributions; only if a part needs them.
        hidden: name -> tensor[A, E] in the target's dtype, on its device or the host; only if a
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

    Attributes:
        request: request id.
        node_ids: int64[W], nodes that have passed the exit layer.
        candidates: one row per node, in the same order.
        layer: number of target layers before the exit.
    """

    request: int
    node_ids: IntArray
    candidates: Candidates
    layer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptHidden:
    """Hidden states of all positions of a prefill chunk.

    Attributes:
        request: request id.
        start: position of the chunk's first token.
        hidden: name -> [T, E], in the target's dtype on its device.
    """

    request: int
    start: int
    hidden: Mapping[HiddenName, torch.Tensor]

    @property
    def last_position(self) -> int:
        """Position of the last row."""
        return self.start + len(next(iter(self.hidden.values()))) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyHidden:
    """Hidden states of nodes of one request that may not be answered yet.

    Attributes:
        request: request id.
        node_ids: int64[W], nodes that have passed the layers.
        hidden: name -> [W, E], in the target's dtype, on its device or the host.
    """

    request: int
    node_ids: IntArray
    hidden: Mapping[HiddenName, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The executor's results of one step.

    Attributes:
        step: the step that these results end.
        answers: answers that arrived in this step, of any earlier batch; a request may occur more
            than once.
        exits: proposals for nodes that passed an exit layer in this step, on any stage.
        prompts: hidden states of prefill chunks; only if a part needs them. ``Needs.hidden``
            arrive when the chunk leaves the target, ``Needs.early_hidden`` when it has passed the
            layer, as separate entries.
        early: ``Needs.early_hidden`` of nodes that passed the layer in this step.
    """

    step: int
    answers: tuple[Answers, ...] = ()
    exits: tuple[Exits, ...] = ()
    prompts: tuple[PromptHidden, ...] = ()
    early: tuple[EarlyHidden, ...] = ()
