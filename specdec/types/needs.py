"""What parts require of each other."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Lossless(StrEnum):
    """The guarantee of a verifier.

    ``TOKEN``: the output equals plain decoding with the same seed, token for token.
    ``DISTRIBUTION``: every token is distributed as under the target. ``LOSSY``: neither; results
    carry this label wherever they are printed.
    """

    TOKEN = "token"  # noqa: S105 - a label, not a secret
    DISTRIBUTION = "distribution"
    LOSSY = "lossy"


class HiddenName(NamedTuple):
    """Name of a hidden state of the target.

    Attributes:
        layer: the layer, from 0, that the state is the output of.
        normed: after the model's final norm, which is the input of the output head; exists for the
            last layer only. False: the residual stream, before any norm.
    """

    layer: int
    normed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Inputs that a source or verifier requires of other parts; checked at composition.

    Attributes:
        target_probs: the target's full processed distribution per answered node.
        draft_probs: the draft's full distribution per expanded node, with candidates sampled from
            it instead of taken from the top.
        target_draws: the target's own keyed draws (allowed under ``match`` only).
        hidden: hidden states of every row, prompt positions included: with its answer
            (``Answers.hidden``, ``Output.prompts``).
        early_hidden: hidden states of every row, as soon as the layer has computed them
            (``Output.early``), before its answer.
        exits: candidates per node in ``Output.exits``; 0: no exits needed.
        further_exits: layers of additional exits, deeper than the model's own
            (``model.exit_layer``).
        real_nodes: ``expand`` must receive nodes of the real trees, whose ids the executor has.
        all_answers: the target's tokens after all answered nodes. If no part needs them and the
            verifier accepts the target's own tokens only (``Lossless.TOKEN``), an executor may
            leave out those after nodes that do not follow from an answer (``Answers.tokens``).
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
