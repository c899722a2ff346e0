"""A draft model with another tokenizer than the target's.

Shape letters: W rows of logits, U draft vocabulary, V target vocabulary, I tokens that both have.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from specdec.clocks.meter import Meter
from specdec.models.runner import ModelRunner
from specdec.models.vocabulary import Translation

MODEL = "translated"
"""Name of the model in ``model=`` and in the meter."""


class TranslatedDraft:
    """The draft's runner, and the translation between its vocabulary and the target's.

    ``vocab_size`` is V; ``weight_bytes`` are the bytes of weights that a pass reads.
    """

    def __init__(
        self, runner: ModelRunner, translation: Translation, *, vocab_size: int, weight_bytes: int
    ) -> None:
        self.runner, self.translation = runner, translation
        self.vocab_size, self.weight_bytes = vocab_size, weight_bytes

    @classmethod
    def from_pair(cls, pair: Any, *, meter: Meter) -> TranslatedDraft:
        """Builds the pair's ``translated`` model, which must share tokens with the target."""
        translation = Translation(pair.vocabulary("target"), pair.vocabulary(MODEL))
        runner = pair.runner(MODEL, meter)
        size = sum(p.nbytes for p in pair.model(MODEL).parameters())
        return cls(runner, translation, vocab_size=pair.vocab_size, weight_bytes=size)

    @cached_property
    def target_ids(self) -> Tensor:
        """Returns ``Translation.target_ids``, int64[I]."""
        return torch.from_numpy(self.translation.target_ids).to(self.runner.device)

    @cached_property
    def _draft_ids(self) -> Tensor:
        return torch.from_numpy(self.translation.draft_ids).to(self.runner.device)

    def shared_logits(self, logits: Tensor) -> Tensor:
        """Selects [W, I] from draft logits [W, U]; a softmax renormalises over the intersection."""
        return logits[:, self._draft_ids.to(logits.device)]

    def target_logits(self, logits: Tensor) -> Tensor:
        """Maps draft logits [W, U] to [W, V]: -inf for target tokens outside the intersection."""
        full = logits.new_full((len(logits), self.vocab_size), -torch.inf)
        full[:, self.target_ids.to(logits.device)] = self.shared_logits(logits)
        return full
