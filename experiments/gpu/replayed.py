"""Real passes of models with random weights, with acceptances from a record.

With random weights no draft token is accepted, and a trained 8B pair is not always available. So
target and draft run in full (buffers, passes, sampling of their logits, copies to the host), and
their answers are replaced by those of a record (``model=replay``). The replacement is metered
separately.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from specdec.clocks.meter import Meter
from specdec.executors.stage import Answerer, ModelAnswerer, ModelStage, Stage
from specdec.interfaces import TokenSource
from specdec.models.execution import Execution
from specdec.models.packing import num_bytes
from specdec.models.runner import ModelRunner
from specdec.pairs import ModelPair
from specdec.pairs.recorded import ReplayModels
from specdec.sampling.keyed_draws import KeyedDraws
from specdec.sources import DraftModelSource, SyntheticSource
from specdec.types import Answers, Batch, Candidates, Commit, HiddenName, Nodes, Output

if TYPE_CHECKING:
    from specdec.state import DecodeState

REPLAY = "replay"
"""Name under which the replacement is metered."""


class ReplayedShapes(ModelPair):
    """A pair of two models and a record."""

    def __init__(
        self,
        *,
        target: PreTrainedModel,
        draft: PreTrainedModel,
        record: ReplayModels,
        attention: str,
        execution: Execution,
    ) -> None:
        """Takes models of one vocabulary, at least as large as that of the record."""
        self.record = record
        self.hidden = record.hidden
        self.target, self.draft = target, draft
        self.vocab_size = int(target.config.vocab_size)
        assert record.vocab_size <= self.vocab_size, "the record's tokens do not fit"
        self.num_layers = int(target.config.num_hidden_layers)
        self.max_positions = int(target.config.max_position_embeddings)
        self.eos_ids = record.eos_ids
        self.weight_bytes = {"target": num_bytes(target), "draft": num_bytes(draft)}
        self._attention, self._execution = attention, execution
        self.meter = Meter()

    def stage(
        self, first: int, last: int, meter: Meter, *, capture: Sequence[HiddenName] = ()
    ) -> Stage:
        """The whole target."""
        assert (first, last) == (0, self.num_layers), "on one device"
        self.meter = meter
        return ModelStage(runner=self._runner(self.target, "target", meter))

    def answerer(self, *, draws: KeyedDraws, needs_probs: bool) -> Answerer:
        """Samples the target's logits, then answers from the record."""
        real = ModelAnswerer(draws=draws, needs_probs=needs_probs)
        replayed = self.record.answerer(draws=draws, needs_probs=needs_probs)
        return _Answerer(real, replayed, lambda: self.meter)  # the stage's, made later

    def runner(self, name: str, meter: Meter) -> ModelRunner:
        """The whole draft."""
        assert name == "draft", name
        return self._runner(self.draft, name, meter)

    def _runner(self, model: PreTrainedModel, name: str, meter: Meter) -> ModelRunner:
        settings = {"attention": self._attention, "execution": self._execution}
        return ModelRunner(model=model, name=name, meter=meter, **settings)  # type: ignore[arg-type]


class _Both:
    """Calls the real part, then the replayed one, whose time is metered apart."""

    def __init__(self, real: Any, replayed: Any, meter: Callable[[], Meter]) -> None:
        self._real, self._replayed, self._meter = real, replayed, meter

    def open(self, request: Any) -> None:
        self._real.open(request)
        self._replayed.open(request)

    def commit(self, commits: Sequence[Commit], *output: Output) -> None:
        self._real.commit(commits, *output)
        with self._meter().model(REPLAY):
            self._replayed.commit(commits, *output)

    def close(self, request_id: int) -> None:
        self._real.close(request_id)
        self._replayed.close(request_id)


class _Answerer(_Both, Answerer):  # type: ignore[misc]
    """Computes the target's own answers and returns the record's."""

    def answer(self, batch: Batch, logits: torch.Tensor | None) -> tuple[Answers, ...]:
        self._real.answer(batch, logits)
        with self._meter().model(REPLAY):
            answers: tuple[Answers, ...] = self._replayed.answer(batch, None)
        return answers


class ReplayedSource(_Both, TokenSource):  # type: ignore[misc]
    """Computes the draft's own candidates and returns the record's; passes are the real ones."""

    def __init__(self, *, real: DraftModelSource, replayed: SyntheticSource, meter: Meter) -> None:
        super().__init__(real, replayed, lambda: meter)
        self.needs, self.vocab_size = real.needs, real.vocab_size

    @property
    def counters(self):  # type: ignore[no-untyped-def]
        return self._real.counters

    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        self._real.expand(state, nodes, k)
        with self._meter().model(REPLAY):
            candidates: Candidates = self._replayed.expand(state, nodes, k)
        return candidates
