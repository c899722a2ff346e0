"""Checks that outputs equal plain decoding token for token in float64, and tests ``KeyedDraws``."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from specdec.certify.cases import (
    GREEDY,
    MIXED_RULES,
    TEMPERATURES_AND_FILTERS,
    WITH_HISTORY,
    Case,
    ending_cases,
    parity_cases,
    random_prompt,
)
from specdec.certify.oracle import reference_draw, unequal
from specdec.certify.report import Outcome, Skipped, joined_details, outcome
from specdec.certify.subject import LONG_POSITIONS, MAX_POSITIONS, Subject, decode_cases
from specdec.errors import UserError
from specdec.sampling.keyed_draws import KeyedDraws, Purpose
from specdec.state import StopRules
from specdec.types import Lossless

NUM_TOKENS = 16
_SMALL_CHUNK = 3
_BATCH = 6  # of groups of requests after the first, which has the configured size
_ROOM = 110  # positions beyond the last token; more than four blocks of 128 are before it
_NUM_GREEDY = 200  # whose draft is always right: no miss empties a tree or a cache
_SPAN = 7  # positions per call; not a divisor of the block size
_FEW: tuple[int, ...] = (0, 1, 2)  # siblings
_MANY = (0, 1, 16, 127, 128, 300)
_BACKWARDS = (900, 380, 377, 255, 0, 70_000)  # first positions of calls, in no order
_LARGE_IDS = (1 << 32, (1 << 40) + 1)


def greedy_parity(subject: Subject) -> Outcome:
    cases = parity_cases({"greedy": GREEDY}, per_sampling=4 * subject.times, num_tokens=NUM_TOKENS)
    return _compared(subject, ((k, cases) for k in ("mixed", "perfect", "ties", *subject.windowed)))


def sampled_parity(subject: Subject) -> Outcome:
    if subject.claims is Lossless.DISTRIBUTION:
        raise Skipped("lossless in distribution only: see distribution")
    samplings = dict(TEMPERATURES_AND_FILTERS)
    if not subject.sampling.greedy:
        samplings["as configured"] = subject.sampling

    def cases(kind: str, num: int) -> tuple[str, list[Case]]:
        sizes = {"vocab_size": subject.model(kind)["vocab_size"], "num_tokens": NUM_TOKENS}
        return kind, parity_cases(samplings, per_sampling=num * subject.times, **sizes)

    return _compared(subject, (cases("mixed", 3), cases("ties", 3), cases("wide", 2)))


def stop_rules(subject: Subject) -> Outcome:
    groups = ((kind, list(_ending_cases(subject, kind))) for kind in ("perfect", "mixed"))
    return _compared(subject, groups, _SMALL_CHUNK)


def _ending_cases(subject: Subject, kind: str) -> Iterator[Case]:
    base = Case(1000, kind, random_prompt(3, 4), GREEDY, StopRules(max_new_tokens=10))
    distinct = WITH_HISTORY["no_repeat_ngram=1"]  # so that the text has many characters
    bases = [base]
    if kind == "perfect":
        bases.append(Case(1500, kind, base.prompt, distinct, StopRules(max_new_tokens=24)))
    elif subject.claims is Lossless.TOKEN:
        sampled = TEMPERATURES_AND_FILTERS["t=1"]
        bases = [replace(base, label=f"{kind}, t=1", sampling=sampled)]
    for base in bases:
        yield from ending_cases(base, subject.oracle(kind).decode(base).output)
    others = [(name, rule, n, NUM_TOKENS) for name, rule in WITH_HISTORY.items() for n in (1, 7)]
    others += [
        (f"prompt of {length} and {limit} new of {MAX_POSITIONS} positions", GREEDY, length, limit)
        for limit in (1, 2, 9)
        for length in (1, MAX_POSITIONS - limit)
    ]
    for number, (name, params, length, limit) in enumerate(others, 2000):
        stop = StopRules(max_new_tokens=limit)
        yield Case(number, f"{kind}, {name}", random_prompt(number, length), params, stop)


def long_request(subject: Subject) -> Outcome:
    num_positions = subject.times * LONG_POSITIONS
    lengths = {"t=1": num_positions - _ROOM, "greedy": _NUM_GREEDY}
    if subject.claims is Lossless.DISTRIBUTION:
        lengths = {"greedy": num_positions - _ROOM}
    params = {**TEMPERATURES_AND_FILTERS, "greedy": GREEDY}
    cases = [
        Case(41 + i, how, random_prompt(7, 5), params[how], StopRules(max_new_tokens=length))
        for i, (how, length) in enumerate(lengths.items())
    ]
    passed: bool | None
    try:
        passed, detail = _compared(subject, [("long", cases)])
    except UserError as error:  # the configured cache is too small
        passed, detail = None, str(error)
    if problems := [*draw_problems(subject.draws, cases[0].id, num_positions)]:
        return False, joined_details([detail, *problems])
    return passed, f"{detail}; {num_positions} positions of draws"


def batch_independence(subject: Subject) -> Outcome:
    filtered = "t=0.8 top_k=9 top_p=0.9"
    samplings = {**MIXED_RULES, filtered: TEMPERATURES_AND_FILTERS[filtered]}
    cases = parity_cases(samplings, per_sampling=2, num_tokens=NUM_TOKENS - 4)
    # The same prompts under other ids would show state shared between requests.
    cases += [replace(case, id=case.id + 500) for case in cases[:4]]
    differing = list[str]()
    serving = subject.small["serving"]
    with subject.composed() as parts:
        nodes = parts.policy.max_cached_nodes(parts.executor.in_flight) or 0
        alone = {case.id: decode_cases(parts, [case])[case.id] for case in cases}
        for size in (2, 5, len(cases)):
            order = cases if size == 2 else [*cases[size % 4 :], *cases[: size % 4]][::-1]
            outputs = decode_cases(parts, order, batch_size=size, prefill_chunk=_SMALL_CHUNK)
            differing += unequal(cases, outputs, alone, f" in batches of {size}")
    detail = f"{len(cases)} requests alone, in batches of 2, 5 and {len(cases)}"
    if serving.get("kv_tokens"):
        most = max(len(case.prompt) + case.stop.max_new_tokens for case in cases) + nodes
        # No block has unused room; the largest request needs both blocks of the second cache.
        for tokens, size in ((most, 1), (2 * most - 2, most - 1)):
            full = {**serving, "kv_tokens": tokens, "block_tokens": size}
            with subject.composed(serving=full) as parts:
                outputs = decode_cases(
                    parts, cases, batch_size=len(cases), prefill_chunk=_SMALL_CHUNK
                )
            differing += unequal(cases, outputs, alone, " in a full cache")
        detail += ", and in a full cache"
    return outcome(differing, f"{detail}: equal outputs")


def _compared(
    subject: Subject, groups: Iterable[tuple[str, Sequence[Case]]], chunk: int = 512
) -> Outcome:
    """Decodes the cases of each kind of pair (``Subject.model``); compares with plain decoding."""
    differing, positions = list[str](), list[int]()
    compared = tokens = accepted = misses = 0
    for kind, cases in groups:
        with subject.composed(kind) as parts:
            size = max(subject.batch_size, _BATCH) if compared else subject.batch_size
            outputs = decode_cases(parts, cases, batch_size=size, prefill_chunk=chunk)
        compared += len(cases)
        for decoded in outputs.values():
            tokens += len(decoded.output)
            accepted += decoded.accepted
            misses += decoded.misses
        for case in cases:
            for found in subject.oracle(kind).differences(case, outputs.get(case.id)):
                differing.append(f"{kind} draft, {case.label}: {found.text}")
                positions.append(found.at)
    if differing and subject.claims is Lossless.LOSSY:
        return False, (
            f"lossy: {len(differing)} of {compared} outputs differ from plain decoding, first at"
            f" token {np.mean(positions):.1f} on average; e.g. {differing[0]}"
        )
    counts = f"{accepted} from drafts, {misses} misses"
    return outcome(
        differing, f"{compared} requests, {tokens} tokens equal plain decoding ({counts})"
    )


def draw_problems(draws: KeyedDraws, prompt_id: int, num_positions: int) -> Iterator[str]:
    """Yields, per purpose, the first random number that differs from ``reference_draw``: at rising
    positions, which reach every block that is computed at once, and at others in no order.
    """
    keys = [(prompt_id, start, _FEW) for start in range(0, num_positions, _SPAN)]
    keys += [
        (prompt_id + high, start, siblings)
        for high in (0, *_LARGE_IDS)
        for start, siblings in zip(_BACKWARDS, 3 * (_FEW, _MANY), strict=True)
    ]
    for purpose in Purpose:
        for key, start, siblings in keys:
            positions = np.arange(start, start + _SPAN)
            drawn = draws.uniform(key, positions, purpose, np.array(siblings)[:, None])
            expected = [
                [reference_draw(draws.seed, key, at, purpose, index) for at in positions.tolist()]
                for index in siblings
            ]
            wrong = positions[(drawn != np.array(expected)).any(axis=0)]
            if len(wrong):
                name = purpose.name.lower()
                yield f"the {name} draw of position {wrong[0]} is not the generator's"
                break
