"""Generated requests for the checks: prompts, sampling transforms and stop rules.

A case's id is the prompt id that keys its draws; ids are unique within a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

import numpy as np
from transformers import RepetitionPenaltyLogitsProcessor

from specdec.sampling.transform import SamplingParams
from specdec.state import TARGET_ORIGIN, RequestState, StopRules

GREEDY = SamplingParams()
TEMPERATURES_AND_FILTERS: dict[str, SamplingParams] = {
    "t=1": SamplingParams(temperature=1.0),
    "t=0.7 top_k=6": SamplingParams(temperature=0.7, top_k=6),
    "t=1.3 top_p=0.8": SamplingParams(temperature=1.3, top_p=0.8),
    "t=0.8 top_k=9 top_p=0.9": SamplingParams(temperature=0.8, top_k=9, top_p=0.9),
    "t=0.9 no_repeat_ngram=2": SamplingParams(temperature=0.9, no_repeat_ngram=2),
}

WITH_HISTORY: dict[str, SamplingParams] = {
    "no_repeat_ngram=2": SamplingParams(no_repeat_ngram=2),
    "no_repeat_ngram=1": SamplingParams(no_repeat_ngram=1),
    "repetition penalty": SamplingParams(processors=(RepetitionPenaltyLogitsProcessor(3.0),)),
}
"""Greedy transforms that depend on the preceding tokens."""

_LETTERS = 4


@dataclass(frozen=True, slots=True)
class Case:
    id: int  # prompt id, which keys the draws
    label: str  # name in messages
    prompt: tuple[int, ...]  # token ids
    sampling: SamplingParams
    stop: StopRules

    def request(self) -> RequestState:
        return RequestState(
            request_id=self.id,
            prompt=np.array(self.prompt, np.int64),
            stop=self.stop,
            sampling=self.sampling,
        )


@dataclass(frozen=True, slots=True)
class Decoded:
    output: tuple[int, ...]  # token ids
    reason: str | None  # why it ended
    accepted: int = 0  # draft tokens, including hits (next tokens that were in the tree)
    misses: int = 0  # answers after which the tree was discarded
    origins: tuple[int, ...] = ()  # index of each token's source, ``TARGET_ORIGIN`` for none

    def proposer(self, at: int) -> str:
        origin = self.origins[at]
        return "the target" if origin == TARGET_ORIGIN else f"source {origin}"


def letters(tokens: Sequence[int]) -> str:
    """Decodes each token to two letters, so that stop strings can cross token boundaries."""
    return "".join(
        chr(97 + token % _LETTERS) + chr(97 + token // _LETTERS % _LETTERS) for token in tokens
    )


def syllables(tokens: Sequence[int]) -> str:
    """Decodes each token to three letters of its own and a hyphen.

    A string without its last hyphen ends inside a token's text.
    """
    return "".join(
        f"{chr(97 + token % 5)}{chr(102 + token // 5 % 5)}{chr(107 + token // 25 % 15)}-"
        for token in tokens
    )


def random_prompt(index: int, length: int, vocab_size: int) -> tuple[int, ...]:
    rng = np.random.default_rng([index, length])
    return tuple(rng.integers(1, vocab_size, length).tolist())


def parity_cases(
    samplings: dict[str, SamplingParams], *, per_sampling: int, vocab_size: int, num_tokens: int
) -> list[Case]:
    """Creates ``per_sampling`` requests under each transform, with prompts of 1 to 13 tokens."""
    lengths = (1, 6, 13, 3)
    stop = StopRules(max_new_tokens=num_tokens)
    cases = []
    for number, (name, params) in enumerate(samplings.items()):
        for i in range(per_sampling):
            index = number * per_sampling + i
            length = lengths[index % len(lengths)]
            prompt = random_prompt(index, length, vocab_size)
            label = f"{name}, prompt of {length} tokens"
            cases.append(Case(11 + 3 * index, label, prompt, params, stop))
    return cases


def ending_cases(base: Case, output: Sequence[int]) -> Iterator[Case]:
    """Yields copies of ``base`` that end early at each token: by EOS, stop string or length.

    ``base`` is a greedy case that ends by its length, ``output`` its tokens under plain decoding.
    """
    ids = count(base.id + 1)

    def case(label: str, stop: StopRules) -> Case:
        return replace(base, id=next(ids), label=f"{base.label}, {label}", stop=stop)

    length = len(output)
    for at in sorted({output.index(token) for token in set(output)}):
        stop = StopRules(max_new_tokens=length, eos_ids=frozenset([output[at]]))
        yield case(f"EOS is output token {at}", stop)
    text = letters(output)
    for at in range(0, length - 2, 2):
        string = text[2 * at + 1 : 2 * at + 4]  # half a token and a whole one
        stop = StopRules(max_new_tokens=length, stop_strings=(string,), decode=letters)
        yield case(f"stop string {string!r} from output token {at}", stop)
    text = syllables(output)
    for at in range(length):
        within = text[4 * at + 1 : 4 * at + 3]  # the token has text before and after it
        across = text[max(0, 4 * at - 6) : 4 * at + 2]  # from inside the token before the last
        for string in (within, across):
            stop = StopRules(max_new_tokens=length, stop_strings=(string,), decode=syllables)
            yield case(f"stop string {string!r} that ends inside output token {at}", stop)
    for limit in range(1, min(length, 7)):
        yield case(f"max_new_tokens={limit}", StopRules(max_new_tokens=limit))
