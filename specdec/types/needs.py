from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Lossless(StrEnum):
    """The guarantee that a verifier gives.

    ``TOKEN``: the output equals plain decoding with the same seed, token for token.
    ``DISTRIBUTION``: every token is distributed as under the target. ``LOSSY``: neither; results
    carry this label wherever they are printed.
    """

    TOKEN = "token"  # noqa: S105 - a label, not a secret
    DISTRIBUTION = "distribution"
    LOSSY = "lossy"


class HiddenName(NamedTuple):
    """Identifies a hidden state of the target: the output of a layer, counted from 0.

    ``normed``: the state after the model's final norm, the input of the output head; only possible
    for the last layer. Otherwise it is the residual stream, before any norm.
    """

    layer: int
    normed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Inputs that a source or verifier requires from other parts; checked at composition.

    Attributes:
        target_probs: the target's full distribution after sampling transforms, per answered node.
        draft_probs: the draft's full distribution per expanded node. Candidates are then sampled
            from it; otherwise they are its most probable tokens.
        target_draws: the random draws with which the target selects its tokens (``match`` only).
        hidden: hidden states of all rows, including prompt positions, with the row's answer.
        early_hidden: hidden states of all rows as soon as the layer has computed them.
        exits: number of candidates per node in ``Output.exits``; 0 if no exits are needed.
        further_exits: layers of exits beyond the model's own (``model.exit_layer``).
        real_nodes: ``expand`` must receive nodes of the real trees, whose ids the executor knows.
        all_answers: the target's tokens after all answered nodes. If no part needs them and the
            verifier is ``Lossless.TOKEN``, an executor may omit the tokens after nodes that are not
            on the target's path (``Answers.tokens``).
    """

    target_probs: bool = False
    draft_probs: bool = False
    target_draws: bool = False
    hidden: tuple[HiddenName, ...] = ()
    early_hidden: tuple[HiddenName, ...] = ()
    exits: int = 0
    further_exits: tuple[int, ...] = ()
    real_nodes: bool = False
    all_answers: bool = False
