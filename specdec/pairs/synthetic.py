"""Pairs without models: hidden target sequences and a draft of known quality."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from specdec.clocks.meter import Meter
from specdec.errors import UserError
from specdec.executors.answerer import AnsweredRequest, Answerer
from specdec.executors.stage import NullStage, Stage
from specdec.models import ModelRunner
from specdec.pairs.interface import NoExit
from specdec.sampling.keyed_draws import KeyedDraws
from specdec.sources.katz import KatzModel
from specdec.sources.synthetic import SyntheticPair
from specdec.types import Answers, Batch, Commit

if TYPE_CHECKING:
    from specdec.sources.synthetic import SyntheticTarget


class SyntheticModels(NoExit):
    """No models: hidden target sequences and a draft of known quality."""

    is_synthetic = True
    tokenizer = None
    eos_ids: frozenset[int] = frozenset()
    max_positions = None
    head_cost = 0.0
    weight_bytes = (0, 0)

    def __init__(self, *, pair: SyntheticPair, num_layers: int = 80) -> None:
        """Wraps ``pair``; ``num_layers`` bounds the number of stages."""
        self._pair = pair
        self.num_layers = num_layers

    @property
    def vocab_size(self) -> int:
        """Tokens of the synthetic vocabulary."""
        return self._pair.vocab_size

    def stage(
        self, first: int, last: int, meter: Meter, *, capture_layers: Sequence[int] = ()
    ) -> Stage:
        """A stage that computes nothing."""
        return NullStage()

    def answerer(self, *, draws: KeyedDraws, needs_probs: bool) -> Answerer:
        """Answers from the hidden sequences; they have no distributions."""
        if needs_probs:
            raise UserError(
                "model=synthetic has target tokens but no target distributions; use verifier=match"
            )
        return SyntheticAnswerer(target=self._pair.target)

    def draft_runner(self, meter: Meter) -> ModelRunner:
        """Refused: compose replaces draft models by the synthetic source."""
        raise UserError("model=synthetic has no draft model; choose source=synthetic")

    def katz(self) -> KatzModel:
        """Refused: there is no text."""
        raise UserError(
            "model=synthetic has no text to count n-grams from; choose source=synthetic"
        )

    def synthetic(self) -> SyntheticPair:
        """The pair itself."""
        return self._pair


def build_synthetic(*, num_layers: int = 80, **keys: Any) -> SyntheticModels:
    """The models of a ``SyntheticPair`` with the given laws."""
    return SyntheticModels(pair=SyntheticPair(**keys), num_layers=num_layers)


class SyntheticAnswerer:
    """Answers from a hidden target sequence instead of a model (``model=synthetic``)."""

    def __init__(self, *, target: SyntheticTarget) -> None:
        """Asks ``target`` for the token after each position."""
        self._target = target

    def open(self, request: AnsweredRequest) -> None:
        """The sequence is keyed by the request's id; nothing to hold."""

    def answer(self, batch: Batch, logits: torch.Tensor | None) -> tuple[Answers, ...]:
        """The hidden token after every row's position (off-path answers are never consumed)."""
        return tuple(
            Answers(
                request=rows.request,
                node_ids=rows.node_ids,
                tokens=self._target.answer(rows.request, rows.positions),
            )
            for rows in batch.trees
        )

    def commit(self, commits: Sequence[Commit]) -> None:
        """Nothing to follow."""

    def close(self, request_id: int) -> None:
        """Nothing to forget."""
