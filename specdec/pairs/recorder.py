"""Records a finished run: one pass of the draft per prompt, after the run.

Shape letters: L generated tokens of a request, K candidates, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from specdec.clocks.meter import Meter
from specdec.errors import UserError
from specdec.metrics import RequestResult, loop_share
from specdec.models.runner import ModelRunner
from specdec.pairs.record import MAX_RANK, NUM_LOGPROBS, Record, RecordedRequest
from specdec.sampling.transform import SamplingParams, SamplingTransform
from specdec.types import IntArray, Lossless

if TYPE_CHECKING:
    from specdec.executors.models import ModelPair

_CHUNK = 512  # rows per pass: their logits are V numbers each


def record_request(
    runner: ModelRunner,
    sampling: SamplingParams,
    *,
    request_id: int,
    prompt: IntArray,
    output: IntArray,
) -> RecordedRequest:
    """Ranks the target's tokens under a draft, at every position of a request.

    The draft reads the target's committed tokens, and candidates are scored by the transform of
    sources (``SamplingTransform.top``). So an entry equals the result of ``expand`` for the node on
    the target's path at that position.

    Args:
        runner: of the whole draft, with a separate meter.
        sampling: of the run.
        request_id: the request's id.
        prompt: int64[T >= 1].
        output: int64[L >= 1], generated tokens.
    """
    transform = SamplingTransform(sampling)
    tokens = np.concatenate([prompt, output])
    first, num_nodes = len(prompt) - 1, len(tokens) - 1
    ranks = np.full(len(output), MAX_RANK, np.int64)
    width = min(NUM_LOGPROBS, runner.vocab_size)
    logprobs = np.full((len(output), width), -np.inf, np.float16)
    cache = runner.new_cache(num_nodes)
    reach = min(num_nodes, runner.max_positions)
    for start in range(0, reach, _CHUNK):
        stop = min(start + _CHUNK, reach)
        positions = np.arange(max(start, first), stop)
        rows = cache.rows(prefix_tokens=tokens[start:stop])
        logits = runner.forward([rows], logits_rows=positions - start).logits
        if logits is None:  # rows of the prompt only
            continue
        histories = None
        if sampling.needs_history:
            histories = [tokens[: p + 1] for p in positions.tolist()]
        best, scores = transform.top(logits, MAX_RANK, histories)
        right = (best == tokens[positions + 1][:, None]) & (scores > -np.inf)
        entries = positions - first
        ranks[entries] = np.where(right.any(axis=1), right.argmax(axis=1), MAX_RANK)
        logprobs[entries] = scores[:, :width]
    return RecordedRequest(id=request_id, num_prompt=len(prompt), ranks=ranks, logprobs=logprobs)


def record_run(
    *,
    pair: ModelPair,
    prompts: Mapping[int, IntArray],
    results: Iterable[RequestResult],
    sampling: SamplingParams,
    about: Mapping[str, Any],
    on_request: Callable[[int], None] = lambda _: None,
) -> Record:
    """Records finished requests without changing the run's tokens or counts.

    Args:
        pair: the models; the draft runs with a separate meter.
        prompts: prompt id -> int64[T].
        results: of the run; requests without a token are skipped.
        sampling: of the run.
        about: origin of the run; ``loop_share`` is added, since replayed tokens are made up.
        on_request: called with the id of every recorded request.
    """
    runner = pair.runner("draft", Meter())
    recorded, outputs = [], []
    for result in results:
        if result.output:
            outputs.append(result.output)
            text = {"prompt": prompts[result.id], "output": np.array(result.output, np.int64)}
            recorded.append(record_request(runner, sampling, request_id=result.id, **text))
        on_request(result.id)
    return Record(
        requests=tuple(recorded),
        vocab_size=pair.vocab_size,
        weight_bytes=(pair.weight_bytes["target"], pair.weight_bytes.get("draft", 0)),
        about={**about, "loop_share": loop_share(outputs)},
    )


def check_recordable(pair: ModelPair, name: str, claims: Lossless) -> None:
    """Checks that a run of the strategy ``name`` can be recorded.

    Raises:
        UserError: the pair has no models, or the strategy's output is not the target's.
    """
    if pair.is_synthetic:
        raise UserError(
            "record=true needs a draft model, which this model= does not have; use model=tiny or"
            " model=hf, or record=false"
        )
    if claims is Lossless.LOSSY:
        raise UserError(
            f"record=true compares the target's tokens with the draft, but strategy={name} emits"
            " other tokens (its verifier is lossy); use verifier=match"
        )
