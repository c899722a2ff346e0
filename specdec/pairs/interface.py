"""The interface of a model pair: a target and its draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from specdec.clocks.meter import Meter
from specdec.executors.answerer import Answerer
from specdec.executors.exits import ExitStage
from specdec.executors.stage import Stage
from specdec.models.runner import ModelRunner
from specdec.sampling.keyed_draws import KeyedDraws
from specdec.sources.pair import SourcePair
from specdec.types import HiddenName


class ModelPair(SourcePair, Protocol):
    """A target and its draft, as builders of strategies see them.

    Optional methods:

    prompts(): (id, int64[T]) of every recorded prompt, in place of ``data=`` (``ReplayModels``).
    conditions(): further conditions of a run, in place of the configuration's (``ReplayModels``).
    fitted_source(source, policy): replaces draft models in the source's configuration node, for
        pairs that have none (``HiddenModels``).
    lone_part(first, last): loads target layers for a process that runs no others
        (``HuggingFacePair``).
    """

    @property
    def max_positions(self) -> int | None:
        """Number of positions of the target; None for no limit."""
        ...

    @property
    def eos_ids(self) -> frozenset[int]: ...

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None: ...

    def stage(
        self, first: int, last: int, meter: Meter, *, capture: Sequence[HiddenName] = ()
    ) -> Stage:
        """Target layers ``first`` .. ``last`` (exclusive).

        Args:
            first, last: layers of the slice.
            meter: counts the passes.
            capture: hidden states, of layers of the slice, that every pass returns.
        """
        ...

    def exit_stage(self, first: int, last: int, meter: Meter, exits: Sequence[int]) -> ExitStage:
        """Target layers ``first`` .. ``last`` with exit heads.

        Args:
            first, last, meter: as for ``stage``.
            exits: number of layers before each exit.
        """
        ...

    def answerer(self, *, draws: KeyedDraws, needs_probs: bool) -> Answerer:
        """Turns the target's logits into answers.

        Args:
            draws: of the run.
            needs_probs: whether answers carry the whole target distribution.
        """
        ...

    def runner(self, name: str, meter: Meter) -> ModelRunner:
        """Runner of a whole model besides the target.

        Args:
            name: "draft", "middle".
            meter: counts its passes.

        Raises:
            UserError: there is no such model.
        """
        ...
