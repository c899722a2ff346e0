from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from specdec.metrics.results import RequestResult


def first_difference(tokens: Sequence[int], ar_tokens: Sequence[int]) -> int | None:
    """Returns the index of the first difference; None if equal. A missing token is a difference."""
    pairs = zip_longest(tokens, ar_tokens)
    return next((i for i, (token, ar_token) in enumerate(pairs) if token != ar_token), None)


def lossless_against(
    rows: Sequence[RequestResult], ar_rows: Sequence[RequestResult], *, claims_tokens: bool = True
) -> dict[str, Any]:
    """Compares a strategy's outputs with those of ``ar`` in the same run.

    Prompts that only one side has and outputs that end early count as different. Every repeat of a
    prompt is compared with its first ``ar`` result. There is no tolerance for numerical ties
    (``certify.numerics`` has one). Unless ``claims_tokens``, nothing is compared.

    Returns:
        ``lossless``, None if nothing was compared; ``num_compared`` outputs, ``num_differing``
        prompts, and ``differing``: the first difference of each output in the order of the prompts,
        at position -1 if an output is missing; a token is None after the end of the shorter output.

    Raises:
        ValueError: the ``ar`` results of one prompt differ from each other.
    """
    expected: dict[int, tuple[int, ...]] = {}
    for row in ar_rows if claims_tokens else ():
        if expected.setdefault(row.id, row.output) != row.output:
            raise ValueError(
                f"the ar results of prompt {row.id} differ from each other: the reference is not"
                " deterministic, so nothing can be compared with it"
            )
    missing = expected.keys() - {row.id for row in rows}
    differing: list[tuple[int, int, int | None, int | None]] = [
        (i, -1, None, None) for i in missing
    ]
    for row in rows if expected else ():
        plain = expected.get(row.id)
        at = -1 if plain is None else first_difference(row.output, plain)
        if at is not None:
            ours, theirs = (o[at] if o and 0 <= at < len(o) else None for o in (row.output, plain))
            differing.append((row.id, at, ours, theirs))
    names = ("id", "position", "token", "ar_token")
    found = sorted(dict.fromkeys(differing), key=lambda d: d[0])
    return {
        "lossless": not found if expected else None,
        "num_compared": sum(row.id in expected for row in rows),
        "num_differing": len({d[0] for d in found}),
        "differing": [dict(zip(names, d, strict=True)) for d in found],
    }
