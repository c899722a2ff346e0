from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from specdec.metrics.results import RequestResult


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference of an output from plain decoding."""

    id: int  # of the prompt
    position: int  # index of the generated token; -1 if the output is missing
    token: int | None  # None after the end of the shorter output
    ar_token: int | None  # likewise


@dataclass(frozen=True, slots=True)
class Parity:
    """``lossless`` is None if nothing was compared or token parity is not claimed."""

    lossless: bool | None
    differing: tuple[Divergence, ...] = ()  # in the order of the prompts
    num_compared: int = 0  # outputs that plain decoding has too


def first_difference(tokens: Sequence[int], ar_tokens: Sequence[int]) -> int | None:
    """Returns the index of the first difference; None if equal. A missing token is a difference."""
    pairs = zip_longest(tokens, ar_tokens)
    return next((i for i, (token, ar_token) in enumerate(pairs) if token != ar_token), None)


def lossless_against(
    rows: Sequence[RequestResult], ar_rows: Sequence[RequestResult], *, claims_tokens: bool = True
) -> Parity:
    """Compares a strategy's outputs with those of ``ar`` in the same run.

    Prompts that only one side has and outputs that end early count as different. Every repeat of a
    prompt is compared with its first ``ar`` result. There is no tolerance for numerical ties
    (``certify.numerics`` has one). Unless ``claims_tokens``, nothing is compared.

    Raises:
        ValueError: the ``ar`` results of one prompt differ from each other.
    """
    if not claims_tokens or not ar_rows:
        return Parity(None)
    expected: dict[int, tuple[int, ...]] = {}
    for row in ar_rows:
        if expected.setdefault(row.id, row.output) != row.output:
            raise ValueError(
                f"the ar results of prompt {row.id} differ from each other: the reference is not"
                " deterministic, so nothing can be compared with it"
            )
    missing = expected.keys() - {row.id for row in rows}
    differing = [Divergence(i, -1, None, None) for i in missing]
    for row in rows:
        plain = expected.get(row.id)
        at = -1 if plain is None else first_difference(row.output, plain)
        if at is not None:
            tokens = (o[at] if o and 0 <= at < len(o) else None for o in (row.output, plain))
            differing.append(Divergence(row.id, at, *tokens))
    differing = sorted(dict.fromkeys(differing), key=lambda d: d.id)
    return Parity(not differing, tuple(differing), sum(row.id in expected for row in rows))
