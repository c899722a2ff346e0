"""Check (h): one request that is longer than every internal block, and its draws."""

from __future__ import annotations

from specdec.certify.cases import GREEDY, TEMPERATURES_AND_FILTERS, Case, random_prompt
from specdec.certify.draws import draw_problems
from specdec.certify.numerics import SingleToken, plain_output
from specdec.certify.parity import difference
from specdec.certify.report import Check, joined_details
from specdec.certify.subject import VOCAB_SIZE, Subject, decode_cases
from specdec.errors import UserError
from specdec.pairs import RandomPair
from specdec.state import StopRules
from specdec.types import Lossless

_ROOM = 110  # positions beyond the last token; more than four blocks of 128 are before it
_PROMPT = random_prompt(7, 5, VOCAB_SIZE)


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
        problems = list(draw_problems(parts.draws, case.id, num_positions))
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
