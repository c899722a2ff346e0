"""Decodes one request that is longer than every internal block, and checks its draws."""

from __future__ import annotations

from specdec.certify.cases import GREEDY, TEMPERATURES_AND_FILTERS, Case, Decoded, random_prompt
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
NUM_GREEDY = 200  # whose draft is always right: no miss empties a tree or a cache
_PROMPT = random_prompt(7, 5, VOCAB_SIZE)


def long_request(subject: Subject) -> Check:
    """Checks that long outputs equal plain decoding, and that the draws are right throughout."""
    if subject.claims is Lossless.LOSSY:
        return Check("long_request", None, "a lossy output has no reference")
    num_positions = subject.long_positions
    num_tokens = num_positions - _ROOM
    lengths = {"t=1": num_tokens, "greedy": NUM_GREEDY}
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
    expected, rows = plain_output(subject, single, case), single.rows
    return difference(subject, lambda tokens: rows[len(tokens) - 1], case, decoded, expected.output)
