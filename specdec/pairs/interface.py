"""The interface of a model pair: a target and its draft."""

from __future__ import annotations

from typing import Protocol

from transformers import PreTrainedTokenizerBase

from specdec.clocks.meter import Meter
from specdec.executors.models import TargetModels
from specdec.models.runner import ModelRunner
from specdec.sources.pair import SourcePair


class ModelPair(SourcePair, TargetModels, Protocol):
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

    def runner(self, name: str, meter: Meter) -> ModelRunner:
        """Runner of a whole model besides the target.

        Args:
            name: "draft", "middle".
            meter: counts its passes.

        Raises:
            UserError: there is no such model.
        """
        ...
