"""Token-by-token comparison with plain decoding, reported as ``lossless``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specdec.metrics.results import RequestResult


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference of an output from plain decoding.

    Attributes:
        id: the prompt's id.
        position: index of the first differing generated token; -1 if the output is missing.
        token, ar_token: the two tokens there; None after the end of the shorter output.
        distance: how far the target was from choosing the other token (margin, distance to a CDF
            edge or a filter's boundary); None if unknown.
    """

    id: int
    position: int
    token: int | None
    ar_token: int | None
    distance: float | None = None


@dataclass(frozen=True, slots=True)
class Parity:
    """Result of a comparison.

    Attributes:
        lossless: whether all outputs are equal except for ties; None if nothing was compared or
            token parity is not claimed.
        differing: first differences that are not ties.
        ties: first differences that are numerical ties.
        num_compared: number of outputs that both rows have.
    """

    lossless: bool | None
    differing: tuple[Divergence, ...] = ()
    ties: tuple[Divergence, ...] = ()
    num_compared: int = 0


def first_difference(tokens: Sequence[int], ar_tokens: Sequence[int]) -> int | None:
    """Index of the first difference, a missing token included; None for equal sequences."""
    for i, (token, ar_token) in enumerate(zip(tokens, ar_tokens, strict=False)):
        if token != ar_token:
            return i
    return None if len(tokens) == len(ar_tokens) else min(len(tokens), len(ar_tokens))


def lossless_against(
    rows: Sequence[RequestResult],
    ar_rows: Sequence[RequestResult],
    *,
    claims_tokens: bool = True,
    distances: Mapping[tuple[int, int], float] | None = None,
    tolerance: float = 0.0,
) -> Parity:
    """Compares a strategy's outputs with those of the ``ar`` row of the same run.

    A prompt of one side only and an output that ends early count as different. All results of a
    prompt (repeats) are compared with its first ``ar`` result.

    Args:
        rows: the strategy's results.
        ar_rows: plain decoding's results on the same prompts.
        claims_tokens: whether the strategy claims token parity; if not, nothing is compared.
        distances: (prompt id, position) -> distance of a divergence.
        tolerance: largest distance of a tie (the numerical difference between batched and
            single-token logits); 0 for no ties, as in float64.

    Raises:
        ValueError: the ``ar`` results of one prompt differ from each other.
    """
    if not claims_tokens or not ar_rows:
        return Parity(None)
    expected: dict[int, RequestResult] = {}
    for row in ar_rows:
        first = expected.setdefault(row.id, row)
        if first.output != row.output:
            raise ValueError(
                f"the ar results of prompt {row.id} differ from each other: the reference is not"
                " deterministic, so nothing can be compared with it"
            )
    differing: list[Divergence] = []
    ties: list[Divergence] = []
    num_compared = 0
    seen: set[int] = set()
    for row in rows:
        seen.add(row.id)
        ar_row = expected.get(row.id)
        if ar_row is None:
            differing.append(Divergence(row.id, -1, None, None))
            continue
        num_compared += 1
        divergence = _divergence(row, ar_row, distances or {})
        if divergence is None or divergence in differing or divergence in ties:
            continue
        tied = divergence.distance is not None and divergence.distance <= tolerance
        (ties if tied else differing).append(divergence)
    for missing in expected.keys() - seen:
        differing.append(Divergence(missing, -1, None, None))
    differing.sort(key=lambda d: d.id)
    return Parity(not differing, tuple(differing), tuple(ties), num_compared)


def _divergence(
    row: RequestResult, ar_row: RequestResult, distances: Mapping[tuple[int, int], float]
) -> Divergence | None:
    at = first_difference(row.output, ar_row.output)
    if at is None:
        return None
    return Divergence(
        id=row.id,
        position=at,
        token=row.output[at] if at < len(row.output) else None,
        ar_token=ar_row.output[at] if at < len(ar_row.output) else None,
        distance=distances.get((row.id, at)),
    )
