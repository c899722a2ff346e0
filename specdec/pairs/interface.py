"""What compose and engine need to know of a target and its draft."""

from __future__ import annotations

from typing import Protocol

from transformers import PreTrainedTokenizerBase

from specdec.executors.answering import Answerer
from specdec.executors.stage import Stage
from specdec.metrics.meter import Meter
from specdec.models import ModelRunner
from specdec.randomness import KeyedDraws
from specdec.sources.katz import KatzModel
from specdec.sources.synthetic import HiddenPair


class ModelPair(Protocol):
    """What compose and engine need to know of a target and its draft."""

    is_synthetic: bool

    @property
    def vocab_size(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def head_cost(self) -> float:
        """What the output head costs in a pass, in layers: its weights over those of a layer."""
        ...

    @property
    def max_positions(self) -> int | None:
        """Positions that both models have; None where there is no limit."""
        ...

    @property
    def eos_ids(self) -> frozenset[int]: ...

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None: ...

    @property
    def weight_bytes(self) -> tuple[int, int]:
        """Bytes of the target's and of the draft's weights."""
        ...

    def stage(self, first: int, last: int, meter: Meter) -> Stage:
        """A slice of the target's layers."""
        ...

    def answerer(self, *, draws: KeyedDraws, needs_probs: bool) -> Answerer: ...

    def draft_runner(self, meter: Meter) -> ModelRunner: ...

    def katz(self) -> KatzModel:
        """The n-gram model that goes with the pair."""
        ...

    def synthetic(self) -> HiddenPair:
        """The hidden sequences of a pair without models."""
        ...
