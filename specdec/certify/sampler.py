"""Checks the sampling of the target's tokens row by row against the reference (``oracle``).

The sampler (``Answerer``) gets generated logits: rows longer than a block of a cumulative sum, with
different parameters in one batch, ids and seeds of more than 32 bits, unordered positions.

Shape letters: A rows, V vocabulary.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from specdec.certify.cases import Case
from specdec.certify.oracle import processed, reference_draw, reference_probs, token_at
from specdec.certify.report import Outcome, Skipped, outcome
from specdec.certify.subject import Subject
from specdec.device import on_host
from specdec.executors.stage import Answerer
from specdec.pairs import HuggingFacePair
from specdec.sampling.keyed_draws import KeyedDraws, Purpose
from specdec.sampling.transform import SamplingParams
from specdec.state import StopRules
from specdec.types import Batch, FloatArray, TreeRows

TOLERANCE = 1e-9  # of a probability
# The last ones are searched by blocks and processed in parts, or longer than such a part.
VOCAB_SIZES = (61, 320, 1000, 33_001, 151_671)
_ROWS = 6  # a chain of nodes per request
_SEED_BITS = 7 << 32  # added to the configured seed
_STARTS = (700, 250, 120, 9, 60)  # positions of the first node: later batches go back


def _in_place(input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
    """A processor that writes into its scores, as transformers' interface allows."""
    scores[:, input_ids[0]] -= 1.5
    return scores


# Neighbours differ in one parameter each, so that results of one must not serve the other.
SAMPLINGS = {
    "greedy": SamplingParams(),
    "t=1": SamplingParams(temperature=1.0),
    "t=1.3": SamplingParams(temperature=1.3),
    "t=1.3 top_p=0.8": SamplingParams(temperature=1.3, top_p=0.8),
    "t=1.3 top_p=0.31": SamplingParams(temperature=1.3, top_p=0.31),
    "t=1.3 top_k=7": SamplingParams(temperature=1.3, top_k=7),
    "t=1.3 top_k=50": SamplingParams(temperature=1.3, top_k=50),
    "t=0.7 top_k=50 top_p=0.9": SamplingParams(temperature=0.7, top_k=50, top_p=0.9),
    "greedy, two processors": SamplingParams(
        processors=(_in_place, RepetitionPenaltyLogitsProcessor(1.7))
    ),
    "t=0.9 no_repeat_ngram=2, a processor": SamplingParams(
        temperature=0.9, no_repeat_ngram=2, processors=(_in_place,)
    ),
    "t=0.9 no_repeat_ngram=4": SamplingParams(temperature=0.9, no_repeat_ngram=4),
}

_Rows = tuple[Case, TreeRows, FloatArray, FloatArray]
"""(request, chain of nodes after its prompt, their logits and their distributions, [A, V] each)."""


def sampler(subject: Subject) -> Outcome:
    pair = subject.pair("mixed")
    if not isinstance(pair, HuggingFacePair):
        raise Skipped("the models' answers are not sampled from logits")
    answerers = [
        (pair.answerer(draws=KeyedDraws(seed=seed), needs_probs=needs_probs), seed)
        for needs_probs in (False, True)
        for seed in (subject.seed, subject.seed + _SEED_BITS)
    ]
    problems, count = list[str](), 0
    for number, vocab_size in enumerate(VOCAB_SIZES):
        parts = list(_parts(number, vocab_size))
        for answerer, seed in answerers:
            for case, *_ in parts:
                answerer.open(case.request())
            for batch in (parts, *([part] for part in parts)):
                problems += _differences(answerer, batch, seed, pair.device)
            for case, _, logits, _ in parts:
                answerer.close(case.id)
                count += len(logits)
    detail = f"{count} rows of up to {max(VOCAB_SIZES)} logits as in the reference"
    return outcome(problems, detail)


def _parts(number: int, vocab_size: int) -> Iterator[_Rows]:
    rng, ids = np.random.default_rng([number, vocab_size]), np.arange(_ROWS)
    for index, (label, params) in enumerate(SAMPLINGS.items()):
        logits = 3.0 * rng.standard_normal((_ROWS, vocab_size))
        logits[1] = np.round(logits[1])  # ties
        logits[2] *= 0.1  # nearly flat: the draw may be anywhere
        logits[3, -3:] += 3.0 * np.log(vocab_size)  # the last ids have most of the mass
        request_id = 20 * number + index + (index % 2 << 33)
        # Four equal tokens are the shortest history in which no_repeat_ngram=4 excludes a token.
        prompt = tuple(rng.integers(0, vocab_size, 4 if index % 2 else 1).tolist() * 4)[:4]
        label, stop = f"{label}, {vocab_size} logits", StopRules(max_new_tokens=1)
        tokens = np.array([prompt[-1], *rng.integers(0, vocab_size, _ROWS - 1)])
        start = _STARTS[number] + index
        rows = TreeRows.within(
            request=request_id, prefix_len=start, node_ids=ids, tokens=tokens, parent_ids=ids - 1
        )
        law = SamplingParams(temperature=1.0) if params.greedy else params
        probs = [
            reference_probs(processed(row, params, (*prompt, *tokens[1 : at + 1].tolist())), law)
            for at, row in enumerate(logits)
        ]
        yield Case(request_id, label, prompt, params, stop), rows, logits, np.stack(probs)


def _differences(
    answerer: Answerer, batch: Sequence[_Rows], seed: int, device: str
) -> Iterator[str]:
    """Yields the first answer of each request that differs from the reference."""
    how = "alone" if len(batch) == 1 else "in a batch"
    logits = torch.from_numpy(np.concatenate([logits for _, _, logits, _ in batch])).to(device)
    answers = answerer.answer(Batch(step=0, trees=tuple(rows for _, rows, *_ in batch)), logits)
    for (case, rows, _, laws), answer in zip(batch, answers, strict=True):
        probs = laws if answer.probs is None else on_host(answer.probs)
        errors = np.abs(probs - laws).max(axis=1)
        for row, (law, position) in enumerate(zip(laws, rows.positions.tolist(), strict=True)):
            draw = reference_draw(seed, case.id, position + 1, Purpose.TARGET)
            expected = int(law.argmax()) if case.sampling.greedy else token_at(law, draw)
            if (token := int(answer.tokens[row])) != expected:
                found = f"row {row} gets token {token} instead of {expected}"
            elif not errors[row] <= TOLERANCE:
                found = f"a probability of row {row} differs by {errors[row]:.1e}"
            else:
                continue
            yield f"{case.label}, {len(case.prompt) + row} tokens, {how}: {found}"
            break
