from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from specdec.clocks import Work
from specdec.models.runner import ModelRunner
from specdec.parts.fields import Count, Positive, validated
from specdec.sampling.candidates import counts_of
from specdec.sampling.transform import SamplingTransform
from specdec.sources.guess_draw import DrawGuesser, NearDraw, target_draws
from specdec.sources.model_source import CachedModelSource, Histories
from specdec.types import Candidates, Commit, Needs, Nodes, Output

if TYPE_CHECKING:
    from specdec.state import DecodeState, RequestState


class DraftModelSource(CachedModelSource):
    """Proposes the most probable, or sampled, next tokens of a draft or middle model.

    The model has its own KV cache. Nodes beyond its maximum position get count 0.

    Args:
        runner: runs all layers of the model; or a function from name to runner.
        model: the model's name, by which a latency profile prices its passes.
        sample: sample candidates without replacement from the draft's distribution after the
            target's sampling transform, and return that distribution (for rejection verifiers).
        guess_draw: rank candidates by the draw with which the target will select its token (Staged
            Speculative Decoding, future work 1). Lossless under ``match``.
        guess_spread: with ``guess_draw``: expected error of the draft's CDF at the draw
            (``NearDraw``); None: ``DrawGuesser``.
        prefill_chunk: maximum number of prompt rows per request and pass.
    """

    @validated
    def __init__(
        self,
        *,
        runner: ModelRunner | Callable[[str], ModelRunner],
        model: Literal["draft", "middle"] = "draft",
        sample: bool = False,
        guess_draw: bool = False,
        guess_spread: Positive | None = 0.2,
        prefill_chunk: Count = 512,
    ) -> None:
        if sample and guess_draw:
            raise ValueError(
                "guess_draw=true reads the target's draws, which would bias a rejection verifier;"
                " use verifier=match or guess_draw=false"
            )
        runner = runner(model) if callable(runner) else runner
        super().__init__(
            runner=runner,
            label=runner.name,
            needs=Needs(target_draws=guess_draw),
            vocab_size=runner.vocab_size,
            sample=sample,
            prefill_chunk=prefill_chunk,
            work=Work(model),
        )
        self.model = model
        self.guesser = DrawGuesser() if guess_draw and guess_spread is None else None
        self._near = None
        if guess_draw and guess_spread is not None:
            self._near = NearDraw(spread=guess_spread)

    def open(self, request: RequestState) -> None:
        super().open(request)
        if self.guesser is not None:
            self.guesser.open(request.id)

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        super().commit(commits, output)
        if self.guesser is not None:
            self.guesser.commit(commits)

    def close(self, request_id: int) -> None:
        super().close(request_id)
        if self.guesser is not None:
            self.guesser.close(request_id)

    def _propose(
        self,
        state: DecodeState,
        nodes: Nodes,
        logits: Tensor,
        transform: SamplingTransform,
        histories: Histories,
        k: int,
    ) -> Candidates:
        guesses = not transform.params.greedy
        if guesses and self._near is not None:
            draws = target_draws(state, nodes)
            return self._near.candidates(transform, logits, histories, draws, k)
        candidates = super()._propose(state, nodes, logits, transform, histories, k)
        if not guesses or self.guesser is None:
            return candidates
        tokens, logprobs = self.guesser.rank(
            state, nodes, transform, logits, histories, candidates.tokens, candidates.logprobs
        )
        counts = counts_of(transform, logprobs)
        return replace(candidates, tokens=tokens, logprobs=logprobs, counts=counts)
