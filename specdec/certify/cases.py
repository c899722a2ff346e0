"""Test requests of ``specdec verify``: prompts, sampling transforms and stop rules.

A case's id is its prompt id, on which random numbers depend; ids are unique within a run.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

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
"""Greedy sampling parameters whose logits processors depend on the preceding tokens."""

MIXED_RULES = {
    "greedy": GREEDY,
    "t=1": TEMPERATURES_AND_FILTERS["t=1"],
    "no_repeat_ngram=2": WITH_HISTORY["no_repeat_ngram=2"],
}

VOCAB_SIZE = 96
_MANY_BYTES = "\u4e2d\U0001f642\u6587\U0001f680"  # CJK and emoji


@dataclass(frozen=True, slots=True)
class Case:
    id: int  # prompt id, on which random numbers depend
    label: str  # name in messages
    prompt: tuple[int, ...]  # token ids
    sampling: SamplingParams
    stop: StopRules

    def request(self) -> RequestState:
        prompt = np.array(self.prompt, np.int64)
        return RequestState(
            request_id=self.id, prompt=prompt, stop=self.stop, sampling=self.sampling
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


def _joined(piece: Callable[[int], str]) -> Callable[[Sequence[int]], str]:
    return lambda tokens: "".join(map(piece, tokens))


letters = _joined(lambda t: chr(97 + t % 4) + chr(97 + t // 4 % 4))
"""Decodes each token to two letters, so that stop strings can cross token boundaries."""

_syllables = _joined(
    lambda t: f"{chr(97 + t % 5)}{chr(102 + t // 5 % 5)}{chr(107 + t // 25 % 15)}-"
)


def _sparse_text(output: Sequence[int]) -> Callable[[Sequence[int]], str]:
    """Returns a decoder by which three tokens of ``output`` have long texts, and others none."""
    texts = {output[0]: "a", output[len(output) // 2]: "b", output[-1]: "c"}
    return _joined(lambda t: 40 * texts.get(t, ""))


def _byte_text(output: Sequence[int]) -> Callable[[Sequence[int]], str]:
    """Returns a decoder, one byte per token, by which ``output`` is text of multi-byte characters.

    An incomplete character becomes a replacement character, as in tokenizers with byte fallback.
    """
    distinct = dict.fromkeys(output)
    byte_of = dict(zip(distinct, (_MANY_BYTES * len(distinct)).encode(), strict=False))
    return lambda tokens: bytes(byte_of.get(t, 63) for t in tokens).decode(errors="replace")


def random_prompt(index: int, length: int, vocab_size: int = VOCAB_SIZE) -> tuple[int, ...]:
    rng = np.random.default_rng([index, length])
    return tuple(rng.integers(1, vocab_size, length).tolist())


def parity_cases(
    samplings: Mapping[str, SamplingParams],
    *,
    per_sampling: int,
    num_tokens: int,
    vocab_size: int = VOCAB_SIZE,
) -> list[Case]:
    """Creates ``per_sampling`` requests for each sampling, with prompts of 1 to 13 tokens."""
    stop, cases = StopRules(max_new_tokens=num_tokens), list[Case]()
    for index, name in enumerate(name for name in samplings for _ in range(per_sampling)):
        length = (1, 6, 13, 3)[index % 4]
        prompt = random_prompt(index, length, vocab_size)
        label = f"{name}, prompt of {length} tokens"
        cases.append(Case(11 + 3 * index, label, prompt, samplings[name], stop))
    return cases


def ending_cases(base: Case, output: Sequence[int]) -> Iterator[Case]:
    """Yields copies of ``base`` that end early at various tokens: by EOS, stop string or length.

    ``base`` is a case that ends by its length, ``output`` its tokens under plain decoding.
    """
    for number, (label, stop) in enumerate(_endings(output), base.id + 1):
        yield replace(base, id=number, label=f"{base.label}, {label}", stop=stop)


def _endings(output: Sequence[int]) -> Iterator[tuple[str, StopRules]]:
    rules = partial(StopRules, max_new_tokens=len(output))
    places = sorted({output.index(token) for token in set(output)})
    for at in places[:: 1 + len(places) // 8]:
        yield f"EOS is token {at}", rules(eos_ids=frozenset([output[at]]))
    in_bytes = _byte_text(output)
    for name, decode, first, size in (
        ("letters", letters, 1, 3),  # half a token and a whole one
        ("syllables", _syllables, 1, 2),  # within a token
        ("syllables", _syllables, 2, 8),  # across three
        ("syllables", _syllables, 2, 40),  # across eleven
        ("tokens without text", _sparse_text(output), 0, 3),
        ("bytes", in_bytes, 0, 2),
        ("bytes", in_bytes, 0, 5),
    ):
        text = decode(output)
        strings = [text[start : start + size] for start in range(first, len(text) - size + 1)]
        whole = list(dict.fromkeys(s for s in strings if "\ufffd" not in s))
        for string in whole[:: 1 + len(whole) // 6]:
            two = string, "~"  # the second occurs nowhere
            yield f"{name}, stop string {string!a}", rules(stop_strings=two, decode=decode)
    for limit in range(1, min(len(output), 7)):
        yield f"max_new_tokens={limit}", StopRules(max_new_tokens=limit)
