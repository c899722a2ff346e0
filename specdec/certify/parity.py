"""Checks that outputs equal plain decoding token for token, in float64, and the keyed draws."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from specdec.certify.cases import (
    GREEDY,
    TEMPERATURES_AND_FILTERS,
    WITH_HISTORY,
    Case,
    Decoded,
    ending_cases,
    parity_cases,
    random_prompt,
)
from specdec.certify.numerics import SingleToken, distance
from specdec.certify.oracle import LogitsOf, plain_decode, processed, reference_draw, target_draw
from specdec.certify.report import Check, joined_details
from specdec.certify.subject import (
    MAX_POSITIONS,
    VOCAB_SIZE,
    WIDE_VOCAB_SIZE,
    Subject,
    decode_cases,
)
from specdec.errors import UserError
from specdec.metrics.compare import first_difference
from specdec.pairs import RandomPair
from specdec.sampling.keyed_draws import KeyedDraws, Purpose
from specdec.sampling.transform import SamplingParams
from specdec.state import StopRules
from specdec.types import Lossless

NUM_TOKENS = 16
_SMALL_CHUNK = 3

_ROOM = 110  # positions beyond the last token; more than four blocks of 128 are before it
_NUM_GREEDY = 200  # whose draft is always right: no miss empties a tree or a cache
_PROMPT = random_prompt(7, 5, VOCAB_SIZE)

_SPAN = 7  # positions per call; not a divisor of the block size
_FEW = (0, 1, 2)  # siblings
_MANY = (0, 1, 16, 127, 128, 300)
_BACKWARDS = (900, 380, 377, 255, 0, 70_000)  # first positions of calls, in no order
_LARGE_IDS = (1 << 32, (1 << 40) + 1)


def greedy_parity(subject: Subject) -> Check:
    """Checks greedy output, with drafts that are often wrong and always right, and with ties."""
    comparison = _Comparison()
    for kind in ("mixed", "perfect", "ties", *subject.windowed):
        cases = parity_cases(
            {"greedy": GREEDY},
            per_sampling=4 * subject.times,
            vocab_size=VOCAB_SIZE,
            num_tokens=NUM_TOKENS,
        )
        comparison.decode(subject, kind, cases)
    return comparison.check("greedy_parity", subject)


def sampled_parity(subject: Subject) -> Check:
    """Checks sampled output against plain decoding with the same seed.

    Also covers a vocabulary that is larger than the block size in which a row is summed.
    """
    if subject.claims is Lossless.DISTRIBUTION:
        return Check("sampled_parity", None, "lossless in distribution only: see distribution")
    samplings = dict(TEMPERATURES_AND_FILTERS)
    if not subject.sampling.greedy:
        samplings["as configured"] = subject.sampling
    comparison = _Comparison()
    for kind, number in {"mixed": 3, "ties": 3, "wide": 2}.items():
        vocab_size = WIDE_VOCAB_SIZE if kind == "wide" else VOCAB_SIZE
        cases = parity_cases(
            samplings,
            per_sampling=number * subject.times,
            vocab_size=vocab_size,
            num_tokens=NUM_TOKENS,
        )
        comparison.decode(subject, kind, cases)
    return comparison.check("sampled_parity", subject)


def stop_rules(subject: Subject) -> Check:
    """Checks EOS, stop strings and limits inside a path, history, and extreme prompt lengths."""
    if subject.claims is Lossless.LOSSY:
        return Check("stop_rules", None, "a lossy output has no reference")
    comparison = _Comparison()
    for kind in ("perfect", "mixed"):
        comparison.decode(subject, kind, _ending_cases(subject, kind), prefill_chunk=_SMALL_CHUNK)
    return comparison.check("stop_rules", subject)


def _ending_cases(subject: Subject, kind: str) -> list[Case]:
    base = Case(1000, kind, random_prompt(3, 4, VOCAB_SIZE), GREEDY, StopRules(max_new_tokens=10))
    distinct = WITH_HISTORY["no_repeat_ngram=1"]  # so that the text has many characters
    bases = [base]
    if kind == "perfect":
        bases.append(Case(1500, kind, base.prompt, distinct, StopRules(max_new_tokens=24)))
    elif subject.claims is Lossless.TOKEN:
        sampled = TEMPERATURES_AND_FILTERS["t=1"]
        bases = [replace(base, label=f"{kind}, t=1", sampling=sampled)]
    cases = [
        case for base in bases for case in ending_cases(base, subject.expected(kind, base).output)
    ]
    number = 2000
    for name, params in WITH_HISTORY.items():
        for length in (1, 7):
            prompt = random_prompt(number, length, VOCAB_SIZE)
            stop = StopRules(max_new_tokens=NUM_TOKENS)
            cases.append(Case(number, f"{kind}, {name}", prompt, params, stop))
            number += 1
    for limit in (1, 2, 9):
        for length in (1, MAX_POSITIONS - limit):
            prompt = random_prompt(number, length, VOCAB_SIZE)
            label = f"{kind}, prompt of {length} and {limit} new of {MAX_POSITIONS} positions"
            cases.append(Case(number, label, prompt, GREEDY, StopRules(max_new_tokens=limit)))
            number += 1
    return cases


def batch_independence(subject: Subject) -> Check:
    """Checks that a request's output is the same alone and in any batch."""
    samplings: dict[str, SamplingParams] = {
        "greedy": GREEDY,
        "t=1": TEMPERATURES_AND_FILTERS["t=1"],
        "t=0.8 top_k=9 top_p=0.9": TEMPERATURES_AND_FILTERS["t=0.8 top_k=9 top_p=0.9"],
        "no_repeat_ngram=2": WITH_HISTORY["no_repeat_ngram=2"],
    }
    cases = parity_cases(
        samplings, per_sampling=2, vocab_size=VOCAB_SIZE, num_tokens=NUM_TOKENS - 4
    )
    # The same prompts under other ids would show state shared between requests.
    cases += [replace(case, id=case.id + 500) for case in cases[:4]]
    alone: dict[int, Decoded] = {}
    batches: dict[str, Mapping[int, Decoded]] = {}
    differing = []
    logits = subject.oracle("mixed").logits
    with subject.composed() as parts:
        for case in cases:
            alone |= decode_cases(parts, [case])
        for size in (2, 5, len(cases)):
            order = cases if size == 2 else [*cases[size % 4 :], *cases[: size % 4]][::-1]
            outputs = decode_cases(parts, order, batch_size=size, prefill_chunk=_SMALL_CHUNK)
            batches[f"batches of {size}"] = outputs
    full = decode_in_full_cache(subject, cases, prefill_chunk=_SMALL_CHUNK)
    if full is not None:
        batches["a full cache"] = full
    for where, decoded in batches.items():
        for case in cases:
            found = difference(subject, logits, case, decoded.get(case.id), alone[case.id].output)
            if found is not None:
                differing.append(f"{case.label} in {where}: {found}")
    if differing:
        return Check("batch_independence", False, joined_details(differing))
    paged = "" if full is None else ", and in a full cache"
    sizes = f"2, 5 and {len(cases)}{paged}"
    detail = f"{len(cases)} requests alone, in batches of {sizes}: equal outputs"
    return Check("batch_independence", True, detail)


class _Comparison:
    def __init__(self) -> None:
        self.differing: list[str] = []
        self.compared = self.tokens = self.accepted = self.misses = 0
        self.positions: list[int] = []

    def decode(
        self, subject: Subject, kind: str, cases: Sequence[Case], prefill_chunk: int = 512
    ) -> None:
        """Decodes cases with a kind of pair (``Subject.model``) and compares the outputs."""
        with subject.composed(kind) as parts:
            outputs = decode_cases(
                parts, cases, batch_size=subject.batch_size, prefill_chunk=prefill_chunk
            )
        for case in cases:
            expected = subject.expected(kind, case)
            decoded = outputs.get(case.id)
            self.compared += 1
            self.tokens += len(expected.output)
            logits = subject.oracle(kind).logits
            found = difference(subject, logits, case, decoded, expected.output)
            if decoded is not None:
                self.accepted += decoded.accepted
                self.misses += decoded.misses
                if found is None and decoded.reason != expected.reason:
                    found = f"ended by {decoded.reason} instead of {expected.reason}"
            if found is not None:
                self.differing.append(f"{kind} draft, {case.label}: {found}")
                output = () if decoded is None else decoded.output
                self.positions.append(first_difference(output, expected.output) or 0)

    def check(self, name: str, subject: Subject) -> Check:
        if not self.differing:
            detail = (
                f"{self.compared} requests, {self.tokens} tokens equal plain decoding"
                f" ({self.accepted} from drafts, {self.misses} misses)"
            )
            return Check(name, True, detail)
        detail = joined_details(self.differing)
        if subject.claims is Lossless.LOSSY:
            mean = sum(self.positions) / len(self.positions)
            detail = (
                f"lossy: {len(self.differing)} of {self.compared} outputs differ from plain"
                f" decoding, first at token {mean:.1f} on average; e.g. {self.differing[0]}"
            )
        return Check(name, False, detail)


def difference(
    subject: Subject,
    logits_of: LogitsOf,
    case: Case,
    decoded: Decoded | None,
    expected: Sequence[int],
) -> str | None:
    """Describes the first difference from the expected output; None if they are equal.

    Says who proposed the token, and by how much plain decoding preferred the other one, from the
    logits of ``logits_of``.
    """
    if decoded is None:
        return "the request was lost"
    at = first_difference(decoded.output, expected)
    if at is None:
        return None
    if at >= len(decoded.output):
        return f"output token {at} is the end instead of {expected[at]}"
    actual = f"output token {at} is {decoded.output[at]} from {decoded.proposer(at)}"
    if at >= len(expected):
        return f"{actual} instead of the end"
    prefix = (*case.prompt, *expected[:at])
    logits = processed(logits_of(prefix), case.sampling, prefix)
    draw = target_draw(subject.seed, case.id, len(prefix))
    margin = distance(logits, case.sampling, draw, decoded.output[at], 0.0)
    return f"{actual} instead of {expected[at]}, {margin.kind} {margin.value:.1e}"


def long_request(subject: Subject) -> Check:
    """Checks that long outputs equal plain decoding, and that the draws are right throughout."""
    if subject.claims is Lossless.LOSSY:
        return Check("long_request", None, "a lossy output has no reference")
    num_positions = subject.long_positions
    num_tokens = num_positions - _ROOM
    lengths = {"t=1": num_tokens, "greedy": _NUM_GREEDY}
    if subject.claims is Lossless.DISTRIBUTION:
        lengths = {"greedy": num_tokens}
    params = {"t=1": TEMPERATURES_AND_FILTERS["t=1"], "greedy": GREEDY}
    cases = [
        Case(41 + i, how, _PROMPT, params[how], StopRules(max_new_tokens=lengths[how]))
        for i, how in enumerate(lengths)
    ]
    with subject.composed("long") as parts:
        problems = list(draw_problems(parts.draws, cases[0].id, num_positions))
        try:
            outputs = decode_cases(parts, cases)
        except UserError as error:  # the configured cache is too small
            return Check("long_request", None, str(error))
    found = [_difference(subject, case, outputs.get(case.id)) for case in cases]
    problems = [text for text in found if text is not None] + problems
    if problems:
        return Check("long_request", False, joined_details(problems))
    shown = " and ".join(f"{length} tokens ({how})" for how, length in lengths.items())
    detail = f"{shown} equal plain decoding; {num_positions} positions of draws"
    return Check("long_request", True, detail)


def _difference(subject: Subject, case: Case, decoded: Decoded | None) -> str | None:
    pair = subject.pair("long")
    assert isinstance(pair, RandomPair)
    single = SingleToken(pair.target)
    expected = plain_decode(
        single,
        seed=subject.seed,
        prompt_id=case.id,
        prompt=case.prompt,
        sampling=case.sampling,
        stop=case.stop,
    ).output
    return difference(subject, lambda t: single.rows[len(t) - 1], case, decoded, expected)


def decode_in_full_cache(
    subject: Subject, cases: Sequence[Case], *, prefill_chunk: int
) -> Mapping[int, Decoded] | None:
    """Decodes one batch in a paged cache that has room only for its largest request.

    Requests wait for blocks and then reuse blocks of others. Returns None if the configured caches
    are not paged.
    """
    serving = subject.small["serving"]
    if not serving.get("kv_tokens"):
        return None
    with subject.composed() as parts:
        nodes = parts.policy.max_cached_nodes(parts.executor.in_flight) or 0
    most = max(len(case.prompt) + case.stop.max_new_tokens for case in cases) + nodes
    full = {**serving, "kv_tokens": most, "block_tokens": 1}  # no block has unused room
    with subject.composed(serving=full) as parts:
        return decode_cases(parts, cases, batch_size=len(cases), prefill_chunk=prefill_chunk)


def draw_problems(draws: KeyedDraws, prompt_id: int, num_positions: int) -> Iterator[str]:
    """Yields draws that differ from the reference, the first one per purpose.

    Positions rise to ``num_positions``, through every block, then go back and forth; siblings are
    few and many; some prompt ids have more than 32 bits.
    """
    rising = [(prompt_id, start, _FEW) for start in range(0, num_positions, _SPAN)]
    jumping = [
        (prompt_id + high, start, siblings)
        for high in (0, *_LARGE_IDS)
        for start, siblings in zip(_BACKWARDS, 3 * (_FEW, _MANY), strict=True)
    ]
    for purpose in Purpose:
        for key in [*rising, *jumping]:
            at = _first_wrong(draws, purpose, *key)
            if at is not None:
                yield f"the {purpose.name.lower()} draw of position {at} is not the generator's"
                break


def _first_wrong(
    draws: KeyedDraws, purpose: Purpose, prompt_id: int, start: int, siblings: Sequence[int]
) -> int | None:
    """Returns the first position from ``start`` on with a wrong draw."""
    positions = np.arange(start, start + _SPAN)
    drawn = draws.uniform(prompt_id, positions, purpose, np.array(siblings)[:, None])
    expected = [
        [reference_draw(draws.seed, prompt_id, at, purpose, index) for at in positions.tolist()]
        for index in siblings
    ]
    wrong = (drawn != np.array(expected)).any(axis=0)
    return int(positions[wrong][0]) if wrong.any() else None
