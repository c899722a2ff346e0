"""Check (d): the distribution of sampled output against that of the target.

Target and draft are tables (``TablePair``), so the exact joint distribution ("law") of every pair
of neighbouring tokens is known. ``NUM_REQUESTS`` requests, each with its own keyed draws, are
decoded through the whole composed strategy and compared with it by a chi-square test and by total
variation.

False-alarm rate: 1e-6 per check, divided among its tests. A check is deterministic in the seed; the
rate bounds the share of seeds at which a lossless strategy would fail.

Shape letters: V vocabulary, N requests, T tokens of an output, C cells of a law.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from specdec.certify.cases import Case
from specdec.certify.oracle import reference_probs
from specdec.certify.report import Check, joined_details
from specdec.certify.subject import Subject, decode_cases
from specdec.compose.build import compose
from specdec.errors import UserError
from specdec.pairs import TablePair
from specdec.sampling.transform import SamplingParams
from specdec.state import StopRules
from specdec.types import FloatArray, IntArray, Lossless

FALSE_ALARM = 1e-6
"""Chance that a lossless strategy fails a distribution check."""

NUM_REQUESTS = 800
_BATCH = 200
_NUM_TOKENS = 4  # deep enough for the branches of SpecInfer's tree
_NUM_TOKENS_SHAPES = 3
_MIN_EXPECTED = 5.0

# Under top-k the target and the opposed draft each exclude tokens that the other keeps.
TARGET_TABLE = (
    (2.0, 1.0, 0.0, 0.5, -1.0),
    (0.0, 1.5, 1.4, -0.5, 0.7),
    (-1.0, 0.2, 2.0, 1.0, 0.3),
    (1.0, 0.9, 0.8, 0.7, 2.5),
    (0.1, 2.2, -0.4, 1.1, 0.6),
)
"""Target logits [V, V] of the next token (column) after each (row)."""

OPPOSED_TABLE = (
    (1.0, 4.0, 0.6, -2.0, 2.0),
    (3.0, 0.0, 2.0, 0.8, 0.2),
    (2.0, 0.6, 2.0, 0.4, -1.0),
    (0.8, 4.0, 0.2, 3.0, 2.0),
    (2.0, 2.0, 1.8, -0.6, 2.4),
)
"""Logits of a draft that prefers other tokens than the target."""

SAMPLINGS = {
    "t=1": SamplingParams(temperature=1.0),
    "t=0.8 top_k=4 top_p=0.95": SamplingParams(temperature=0.8, top_k=4, top_p=0.95),
}

_SHAPES: dict[str, dict[str, Any]] = {
    "a chain of 2": {"_target_": "specdec.policies.Chain", "gamma": 2},
    "a tree of 3, 2": {"_target_": "specdec.policies.Static", "branching": [3, 2]},
}


def chi_square(counts: IntArray, law: FloatArray) -> float:
    """The p-value of counts[C] under ``law``[C]; 0 if a cell of probability 0 has counts.

    Cells with fewer than 5 expected counts are merged (Cochran's rule).
    """
    expected = law * counts.sum()
    if counts[expected == 0.0].any():
        return 0.0
    rare = expected < _MIN_EXPECTED
    merged = np.append(expected[~rare], expected[rare].sum())
    observed = np.append(counts[~rare], counts[rare].sum())
    used = merged > 0.0
    merged, observed = merged[used], observed[used]
    statistic = float(((observed - merged) ** 2 / merged).sum())
    half = torch.tensor([(len(merged) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1])) if len(merged) > 1 else 1.0


def total_variation(
    counts: IntArray, law: FloatArray, *, false_alarm: float = FALSE_ALARM
) -> tuple[float, float]:
    """Total variation of counts[C] from ``law``[C], and its bound at the false-alarm rate.

    For counts drawn from ``law`` its mean is at most sqrt(cells / N) / 2, and by McDiarmid's
    inequality it exceeds its mean by t with probability at most exp(-2 N t ** 2).
    """
    num = int(counts.sum())
    mean = np.sqrt(np.count_nonzero(law) / num) / 2
    slack = np.sqrt(np.log(1 / false_alarm) / (2 * num))
    return float(np.abs(counts / num - law).sum() / 2), float(mean + slack)


def pair_laws(table: FloatArray, start: int, num_tokens: int) -> Iterator[FloatArray]:
    """float64[V * V]: the exact joint law of tokens i and i + 1, for i = 0 .. num_tokens - 2.

    Args:
        table: float64[V, V], probability of the next token (column) after each (row).
        start: the prompt's last token.
        num_tokens: number of output tokens.
    """
    marginal = table[start]
    for _ in range(num_tokens - 1):
        yield (marginal[:, None] * table).ravel()
        marginal = marginal @ table


def pair_counts(tokens: IntArray, vocab_size: int) -> Iterator[IntArray]:
    """int64[V * V] per i: the count of each pair of tokens i and i + 1 in ``tokens``[N, T]."""
    for i in range(tokens.shape[1] - 1):
        cells = tokens[:, i] * vocab_size + tokens[:, i + 1]
        yield np.bincount(cells, minlength=vocab_size**2)


def distribution(subject: Subject) -> Check:
    """(d) Sampled output has the distribution of the target."""
    if subject.claims is Lossless.TOKEN:
        return Check("distribution", None, "not needed: lossless token for token")
    shapes: dict[str, dict[str, Any]] = {"as configured": {}}
    if subject.claims is Lossless.DISTRIBUTION and subject.build is compose:
        shapes |= {name: {"policy": policy} for name, policy in _SHAPES.items()}
    biased, worst, farthest, num_tests = [], 1.0, 0.0, 0
    # Two statistics for each pair of neighbouring tokens divide the rate.
    level = FALSE_ALARM / (2 * len(shapes) * len(SAMPLINGS) * (_NUM_TOKENS - 1))
    for name, changes in shapes.items():
        for label, params in SAMPLINGS.items():
            try:
                tests = list(_pair_tests(subject, params, changes))
            except UserError:
                if not changes:
                    raise
                continue  # the configured parts refuse this policy
            for i, (counts, law) in enumerate(tests):
                num_tests += 1
                p_value = chi_square(counts, law)
                distance, bound = total_variation(counts, law, false_alarm=level)
                worst, farthest = min(worst, p_value), max(farthest, distance)
                if p_value < level or distance > bound:
                    biased.append(
                        f"{name}, {label}, tokens {i} and {i + 1}: p={p_value:.1e}, total variation"
                        f" {distance:.3f}"
                    )
    if biased:
        prefix = "lossy: " if subject.claims is Lossless.LOSSY else "not the target's law: "
        detail = f"{prefix}total variation up to {farthest:.3f}; {joined_details(biased, limit=2)}"
        return Check("distribution", False, detail)
    detail = (
        f"{num_tests} chi-square tests of {NUM_REQUESTS} requests at a false-alarm rate of"
        f" {FALSE_ALARM:.0e} in all: least p {worst:.2g}, total variation at most {farthest:.3f}"
    )
    return Check("distribution", True, detail)


def _pair_tests(
    subject: Subject, params: SamplingParams, changes: dict[str, Any]
) -> Iterator[tuple[IntArray, FloatArray]]:
    """(counts[V * V], exact law[V * V]) of each pair of neighbouring tokens."""
    section = {"kind": "table", "target": TARGET_TABLE, "draft": OPPOSED_TABLE}
    pair = TablePair(target=TARGET_TABLE, draft=OPPOSED_TABLE)
    num_tokens = _NUM_TOKENS_SHAPES if changes else _NUM_TOKENS
    stop = StopRules(max_new_tokens=num_tokens)
    cases = [Case(i, "", (0,), params, stop) for i in range(NUM_REQUESTS)]
    with subject.composed(pair=pair, **{**changes, "model": section}) as parts:
        outputs = decode_cases(parts, cases, batch_size=_BATCH)
    tokens = np.array([outputs[case.id].output for case in cases])
    rows = np.array(TARGET_TABLE)
    table = np.stack([reference_probs(row, params) for row in rows])
    laws = pair_laws(table, 0, num_tokens)
    yield from zip(pair_counts(tokens, len(rows)), laws, strict=True)
