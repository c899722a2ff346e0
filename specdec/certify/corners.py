"""Cases that short requests do not reach by themselves: full caches, and tokens without text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from specdec.certify.cases import Case, Decoded
from specdec.certify.subject import Subject, decode_cases
from specdec.state import StopRules

_WITH_TEXT = 3  # one token id in three has text
_STRING = 3  # letters of a stop string, which then spans two tokens


def sparse_text(tokens: Sequence[int]) -> str:
    """Decodes every third token id to two letters, and the others to nothing, as special tokens."""
    return "".join(
        chr(97 + token // _WITH_TEXT % 6) + chr(103 + token // _WITH_TEXT // 6 % 6)
        for token in tokens
        if token % _WITH_TEXT == 0
    )


def sparse_cases(base: Case, output: Sequence[int], first_id: int) -> list[Case]:
    """Creates copies of ``base`` that end by stop strings with textless tokens in between.

    ``base`` ends by its length, ``output`` has its tokens under plain decoding.
    """
    text, length = sparse_text(output), len(output)
    strings = [text[at : at + _STRING] for at in range(len(text) - _STRING + 1)]
    cases = []
    for number, string in enumerate(dict.fromkeys(strings)):
        stop = StopRules(max_new_tokens=length, stop_strings=(string,), decode=sparse_text)
        label = f"{base.label}, stop string {string!r} among tokens without text"
        cases.append(replace(base, id=first_id + number, label=label, stop=stop))
    return cases


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
        held = parts.policy.held_nodes(parts.executor.in_flight) or 0
    most = max(len(case.prompt) + case.stop.max_new_tokens for case in cases) + held
    full = {**serving, "kv_tokens": most, "block_tokens": 1}  # no block has unused room
    with subject.composed(serving=full) as parts:
        return decode_cases(parts, cases, batch_size=len(cases), prefill_chunk=prefill_chunk)
