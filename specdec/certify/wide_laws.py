"""Compares sampled output over a large vocabulary with the target's law for each preceding token.

The tables of ``laws`` are small so that whole joint laws can be tested, but they do not show what
depends on a token's probability or on its position in a long row. Here a vocabulary has hundreds
or thousands of tokens, half of the mass lies on a few of them and half on a long tail, and the
draft is equal to the target, near it or far from it. A token's row is its id modulo the number of
rows, so every row has its own pair of distributions.

Output tokens are counted by the row of the token before them. Given that row they are independent
draws of the target, wherever in a step or a tree they were decided. Four partitions of the
vocabulary are tested: single tokens, the draft's probability, blocks of neighbouring ids, and both
ends of the vocabulary.

Shape letters: V vocabulary, R rows of a table, C cells of a partition.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from specdec.certify.evidence import log_evidence
from specdec.certify.oracle import reference_probs
from specdec.pairs import TablePair
from specdec.sampling.transform import SamplingParams
from specdec.types import FloatArray, IntArray

_HEAD = 8  # tokens with half of the mass
_PROB_EDGES = (1e-5, 1e-4, 1e-3, 1e-2, 0.05)  # of the cells by the draft's probability
_RATIO_EDGES = (0.9, 1.1)  # of the cells by the draft's probability relative to the target's
_PLACE = 64  # neighbouring tokens per cell by place; a vocabulary has a shorter last cell
_FLAT = 0.5  # standard deviation of the logits of a row without a head


def wide_tables(vocab_size: int, seed: int = 0) -> dict[str, tuple[FloatArray, FloatArray]]:
    """Maps each kind of row to (target's logits[V], draft's logits[V])."""
    rng = np.random.default_rng([seed, vocab_size])

    def noise(scale: float) -> FloatArray:
        return scale * rng.normal(size=vocab_size)

    def peaked() -> FloatArray:
        logits = noise(1.0)
        head = rng.choice(vocab_size, _HEAD, replace=False)
        head[:2] = 0, vocab_size - 1 - rng.integers(vocab_size % _PLACE)  # both ends of a row
        tail = np.exp(np.delete(logits, head)).sum()
        logits[head] = np.log(tail / _HEAD) + 0.5 * rng.normal(size=_HEAD)
        return logits

    equal, near, mixed, flat = peaked(), peaked(), peaked(), noise(_FLAT)
    return {
        "equal": (equal, equal),
        "near": (near, near + noise(0.3)),
        "far": (mixed, peaked()),
        "flat": (flat, flat + noise(0.3)),
        "flat draft": (peaked(), noise(_FLAT)),
        "flat target": (noise(_FLAT), peaked()),
    }


def wide_pair(tables: dict[str, tuple[FloatArray, FloatArray]]) -> TablePair:
    target, draft = (np.stack(rows) for rows in zip(*tables.values(), strict=True))
    return TablePair(target=target.tolist(), draft=draft.tolist())


def partitions(target: FloatArray, draft: FloatArray) -> Iterator[tuple[str, IntArray]]:
    """Yields (name, int64[V], the cell of each token) for two distributions[V]."""
    num = len(target)
    yield "single tokens", np.arange(num)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.searchsorted(_RATIO_EDGES, np.nan_to_num(draft / target, nan=1.0, posinf=2.0))
    yield "probabilities", np.searchsorted(_PROB_EDGES, draft) * (len(_RATIO_EDGES) + 1) + ratio
    place = np.arange(num) // _PLACE
    yield "places", place
    yield "ends", np.where(place == 0, 1, 0) + np.where(place == place[-1], 2, 0)


def wide_evidence(
    tables: dict[str, tuple[FloatArray, FloatArray]],
    params: SamplingParams,
    start: IntArray,
    tokens: IntArray,
) -> Iterator[tuple[str, float]]:
    """Yields (description, log e-value) for each row and partition, and for all rows together.

    ``start`` is int64[N], the last token of each prompt; ``tokens`` int64[N, T], the outputs.
    """
    before = np.concatenate([start[:, None], tokens[:, :-1]], axis=1) % len(tables)
    together: dict[str, float] = {}
    for row, (kind, pair) in enumerate(tables.items()):
        target, draft = (reference_probs(logits, params) for logits in pair)
        drawn = tokens[before == row]
        for name, cells in partitions(target, draft):
            law: FloatArray = np.bincount(cells, weights=target).astype(np.float64)
            counts = np.bincount(cells[drawn], minlength=len(law))
            value = log_evidence(counts, law)
            together[name] = together.get(name, 0.0) + value
            yield f"{kind}, {name}", value
    for name, value in together.items():  # given the rows, the counts are independent
        yield f"all rows, {name}", value
