"""Laws and times of strategies on pairs whose probabilities are known."""

from collections.abc import Iterator
from functools import cache

import numpy as np
import torch
from scipy.stats import chisquare

from specdec.certify.laws import TARGET_TABLE
from specdec.certify.subject import decode_cases
from specdec.compose.workbench import Parts, Workbench
from specdec.pairs import build_pair
from specdec.pairs.recorded import SyntheticModels
from specdec.sampling.transform import SamplingParams
from specdec.state import StopRules
from specdec.testing import Case
from specdec.types import Batch, FloatArray, IntArray
from tests import toys


def chi_square(counts: IntArray, law: FloatArray) -> float:
    """Returns the p-value of counts[C] under ``law``[C]; 0 if a cell of probability 0 has counts.

    Cells with fewer than 5 expected counts are merged (Cochran's rule).
    """
    expected = law * counts.sum()
    if counts[expected == 0.0].any():
        return 0.0
    rare = expected < 5.0
    merged = np.append(expected[~rare], expected[rare].sum())
    observed = np.append(counts[~rare], counts[rare].sum())
    used = merged > 0.0
    if used.sum() < 2:
        return 1.0
    return float(chisquare(observed[used], merged[used] * observed.sum() / merged.sum()).pvalue)


def pair_laws(table: FloatArray, start: int, num_tokens: int) -> Iterator[FloatArray]:
    """Yields float64[V * V] per i: the exact joint law of tokens i and i + 1 after token ``start``.

    ``table`` is float64[V, V], the probability of the next token (column) after each (row).
    """
    marginal = table[start]
    for _ in range(num_tokens - 1):
        yield (marginal[:, None] * table).ravel()
        marginal = marginal @ table


def least_p_value(parts: Parts, num: int, *, num_tokens: int = 4, batch_size: int = 120) -> float:
    """Least p-value of neighbouring tokens, of ``num`` requests to a target of ``TARGET_TABLE``."""
    stop, rule = StopRules(max_new_tokens=num_tokens), SamplingParams(temperature=1.0)
    cases = [Case(i, "", (1, 0), rule, stop) for i in range(num)]
    decoded = decode_cases(parts, cases, batch_size=batch_size)
    assert sum(one.accepted for one in decoded.values()) > num // 8
    tokens = np.array([decoded[i].output for i in range(num)])
    table = torch.tensor(TARGET_TABLE, dtype=torch.float64).softmax(dim=1).numpy()
    laws = pair_laws(table, 0, tokens.shape[1])
    cells = (tokens[:, :-1] * len(table) + tokens[:, 1:]).T
    counts = [np.bincount(pairs, minlength=table.size) for pairs in cells]
    return min(chi_square(*both) for both in zip(counts, laws, strict=True))


@cache
def one_class(alpha: float) -> SyntheticModels:
    """A draft whose first candidate is right with probability ``alpha``, at every position."""
    law = {"weights": [1.0], "top1": [alpha], "decay": [2.0], "miss": [0.0]}
    models = build_pair({"kind": "synthetic", **law, "vocab_size": 4096})
    assert isinstance(models, SyntheticModels)
    return models


def ranks(alpha: float) -> list[float]:
    """Chance that the target's token is the first, second, ... candidate of ``one_class``."""
    found: list[float] = one_class(alpha).hidden.class_probs[0].tolist()  # type: ignore[attr-defined]
    return found


def one_class_bench(alpha: float, target: float, draft: float) -> Workbench:
    """``one_class`` on a simulated clock; times of a target or stage pass and of a draft pass."""
    return Workbench(one_class(alpha), clock=toys.simulated(target, draft))


def submitted_batches(parts: Parts) -> list[Batch]:
    """Fills with the batches that the executor is given."""
    batches: list[Batch] = []
    submit = parts.executor.submit

    def noting(batch: Batch) -> None:
        batches.append(batch)
        submit(batch)

    parts.executor.submit = noting  # type: ignore[method-assign]
    return batches
