"""What compose and engine need to know of a target and its draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from specdec.clocks.meter import Meter
from specdec.errors import UserError
from specdec.executors.answerer import Answerer
from specdec.executors.exits import ExitStage
from specdec.executors.stage import Stage
from specdec.models import ModelRunner
from specdec.models.medusa import MedusaHeads
from specdec.sampling.keyed_draws import KeyedDraws
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

    def stage(
        self, first: int, last: int, meter: Meter, *, capture_layers: Sequence[int] = ()
    ) -> Stage:
        """A slice of the target's layers, some of which hand out what they compute."""
        ...

    @property
    def exit_layer(self) -> int:
        """Layers before the early exit; UserError where there is none."""
        ...

    def exit_stage(self, first: int, last: int, meter: Meter, exits: Sequence[int]) -> ExitStage:
        """A slice of the target's layers with early exits; ``exits``: layers before each."""
        ...

    def exit_bytes(self, *, with_layers: bool) -> int:
        """Bytes of weights that a pass of the exit head reads, with or without those before it."""
        ...

    def medusa_heads(self, num_heads: int, meter: Meter, *, alone: bool = False) -> MedusaHeads:
        """Heads on the target's last hidden state; ``alone`` where its layers are elsewhere."""
        ...

    def answerer(self, *, draws: KeyedDraws, needs_probs: bool) -> Answerer: ...

    def draft_runner(self, meter: Meter) -> ModelRunner: ...

    def katz(self) -> KatzModel:
        """The n-gram model that goes with the pair."""
        ...

    def synthetic(self) -> HiddenPair:
        """The hidden sequences of a pair without models."""
        ...


class NoExit:
    """The exit of a pair whose target has no hidden states to exit with."""

    @property
    def exit_layer(self) -> int:
        """Refused: there are no layers that compute anything."""
        raise UserError(
            "source=early_exit reads the target's hidden states, which this model does not have;"
            " use model=tiny, model=hf or model=random"
        )

    def exit_stage(self, first: int, last: int, meter: Meter, exits: Sequence[int]) -> ExitStage:
        """Refused, as ``exit_layer``."""
        raise AssertionError(self.exit_layer)

    def exit_bytes(self, *, with_layers: bool) -> int:
        """Refused, as ``exit_layer``."""
        return self.exit_layer

    def medusa_heads(self, num_heads: int, meter: Meter, *, alone: bool = False) -> MedusaHeads:
        """Refused, as ``exit_layer``."""
        raise UserError(
            "source=medusa reads the target's hidden states, which this model does not have; use"
            " model=tiny, model=hf or model=random"
        )
