"""Check (h): one request that is longer than every internal block, and its draws."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from specdec.certify.cases import GREEDY, TEMPERATURES_AND_FILTERS, Case, random_prompt
from specdec.certify.numerics import SingleToken, plain_output
from specdec.certify.oracle import reference_draw
from specdec.certify.parity import difference
from specdec.certify.report import Check, joined_details
from specdec.certify.subject import VOCAB_SIZE, Subject, decode_cases
from specdec.errors import UserError
from specdec.pairs import RandomPair
from specdec.sampling.keyed_draws import KeyedDraws, Purpose
from specdec.state import StopRules
from specdec.types import Lossless

_ROOM = 110  # positions beyond the last token; more than four blocks of 128 are before it
_PROMPT = random_prompt(7, 5, VOCAB_SIZE)
_INDICES = 3
_SPAN = 7  # positions per request for draws, which divides no block


def long_request(subject: Subject) -> Check:
    """(h) A long output equals plain decoding, and no draw of its positions is used twice."""
    if subject.claims is Lossless.LOSSY:
        return Check("long_request", None, "a lossy output has no reference")
    exact = subject.claims is Lossless.TOKEN
    params = TEMPERATURES_AND_FILTERS["t=1"] if exact else GREEDY
    num_positions = subject.long_positions
    num_tokens = num_positions - _ROOM
    case = Case(41, "long", _PROMPT, params, StopRules(max_new_tokens=num_tokens))
    pair = subject.pair("long")
    assert isinstance(pair, RandomPair)
    with subject.composed("long") as parts:
        problems = list(_draw_problems(parts.draws, case.id, num_positions))
        try:
            outputs = decode_cases(parts, [case])
        except UserError as error:  # the configured cache is too small
            return Check("long_request", None, str(error))
    single = SingleToken(pair.target)
    expected = plain_output(subject, single, case)
    decoded, rows = outputs.get(case.id), single.rows
    found = difference(
        subject, lambda tokens: rows[len(tokens) - 1], case, decoded, expected.output
    )
    if found is not None:
        problems.insert(0, found)
    if problems:
        return Check("long_request", False, joined_details(problems))
    how = "t=1" if exact else "greedy"
    detail = f"{num_tokens} tokens ({how}) equal plain decoding; {num_positions} positions of draws"
    return Check("long_request", True, detail)


def _draw_problems(draws: KeyedDraws, prompt_id: int, num_positions: int) -> Iterator[str]:
    """Draws that differ from a second implementation of the generator, the first per purpose."""
    indices = np.arange(_INDICES)[:, None]
    for purpose in Purpose:
        for start in range(0, num_positions, _SPAN):
            positions = np.arange(start, start + _SPAN)
            drawn = draws.uniform(prompt_id, positions, purpose, indices)
            expected = [
                [
                    reference_draw(draws.seed, prompt_id, at, purpose, index)
                    for at in positions.tolist()
                ]
                for index in range(_INDICES)
            ]
            wrong = (drawn != np.array(expected)).any(axis=0)
            if wrong.any():
                at = int(positions[wrong][0])
                yield f"the {purpose.name.lower()} draw of position {at} is not the generator's"
                break
