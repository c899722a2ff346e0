"""Compares the distribution of sampled output with that of the target.

Target and draft are tables (``TablePair``), so the exact distributions (*laws*) of the output are
known. Requests, each with its own keyed draws, are decoded by the whole composed strategy:

- small tables, with a draft opposed to the target and with one that crowds a token: the joint law
  of every pair of neighbouring tokens, by e-values and by total variation, and the law of the token
  after each other one, by e-values;
- a large vocabulary with drafts of six kinds (``wide_tables``): the law of the token after each
  row.

False-alarm rate: 1e-6 per check, half of it for the mean of all e-values, half for the total
variations. A check is deterministic in the seed; the rate bounds the share of seeds at which a
lossless strategy would fail.

An *e-value* is a non-negative statistic whose mean is at most 1 if the tested law is true, so by
Markov's inequality it reaches 1 / a with probability at most a. Here it is a likelihood ratio: the
likelihood of the counts under a mixture of laws around the tested one, divided by that under the
law itself. Unlike a chi-square test it needs no least number of expected counts, so cells of small
probability are not merged. It may be computed from tokens of sequences, whose number of visits is
random (a test martingale, Ville 1939; Ramdas et al. 2023, "Game-theoretic statistics"). The mean of
e-values is an e-value, even if they depend on each other.

Shape letters: V vocabulary, N requests, T tokens of an output, C cells of a law or of a partition
of the vocabulary, M concentrations of the mixture.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from specdec.certify.cases import Case
from specdec.certify.oracle import reference_probs
from specdec.certify.report import Check, joined_details
from specdec.certify.subject import Subject, decode_cases
from specdec.compose.workbench import compose
from specdec.errors import UserError
from specdec.pairs import TablePair
from specdec.sampling.transform import SamplingParams
from specdec.serving.feeding import Feeding
from specdec.state import StopRules
from specdec.types import FloatArray, IntArray, Lossless

Table = tuple[tuple[float, ...], ...]
"""Logits of the next token (column) after each token (row), [V, V]."""

FALSE_ALARM = 1e-6
"""Chance that a lossless strategy fails a distribution check."""

NUM_REQUESTS = 800
_BATCH = 25  # where requests take turns, each step has a cost per open request
_NUM_TOKENS = 4  # deep enough for the branches of SpecInfer's tree
_NUM_TOKENS_SHAPES = 3
_MIN_EXPECTED = 5.0
_WIDE_VOCAB = 8168  # not a multiple of the block size in which a row is summed
_FULL_VOCAB = 40_040  # with depth=full
_WIDE_REQUESTS = 600
_WIDE_BATCH = 60
_WIDE_TOKENS = 4
_NUM_WIDE_TESTS = 2 * 7 * 4  # transforms, rows and all together, partitions; per vocabulary

# Under top-k the target and the opposed draft each exclude tokens that the other keeps.
TARGET_TABLE: Table = (
    (2.0, 1.0, 0.0, 0.5, -1.0),
    (0.0, 1.5, 1.4, -0.5, 0.7),
    (-1.0, 0.2, 2.0, 1.0, 0.3),
    (1.0, 0.9, 0.8, 0.7, 2.5),
    (0.1, 2.2, -0.4, 1.1, 0.6),
)

OPPOSED_TABLE: Table = (
    (1.0, 4.0, 0.6, -2.0, 2.0),
    (3.0, 0.0, 2.0, 0.8, 0.2),
    (2.0, 0.6, 2.0, 0.4, -1.0),
    (0.8, 4.0, 0.2, 3.0, 2.0),
    (2.0, 2.0, 1.8, -0.6, 2.4),
)
"""A draft that prefers other tokens than the target."""

_SHARES = (
    ((30, 20, 15, 10, 25), (60, 10, 8, 3, 19)),
    ((26, 25, 8, 14, 27), (9, 12, 3, 3, 73)),
    ((25, 25, 8, 13, 29), (14, 73, 3, 7, 3)),
    ((19, 18, 8, 17, 38), (9, 57, 3, 3, 28)),
    ((33, 21, 20, 8, 18), (3, 4, 11, 4, 78)),
)  # percent: (target's row, draft's row)

CROWDED_TABLES: tuple[Table, Table] = (
    tuple(tuple(math.log(share / 100) for share in target) for target, _ in _SHARES),
    tuple(tuple(math.log(share / 100) for share in draft) for _, draft in _SHARES),
)
"""A target, and a draft that crowds one token, which is often rejected. The acceptance tests of its
siblings then have probabilities between 0 and 1; with the opposed draft nearly all are 0 or 1.
"""

SAMPLINGS = {
    "t=1": SamplingParams(temperature=1.0),
    "t=0.8 top_k=4 top_p=0.95": SamplingParams(temperature=0.8, top_k=4, top_p=0.95),
}

WIDE_SAMPLINGS = {
    "t=1": SamplingParams(temperature=1.0),
    "t=0.9 top_k=1000 top_p=0.99": SamplingParams(temperature=0.9, top_k=1000, top_p=0.99),
}

_SHAPES: dict[str, dict[str, Any]] = {
    "a chain of 2": {"_target_": "specdec.policies.Chain", "gamma": 2},
    "a tree of 3, 2": {"_target_": "specdec.policies.Static", "branching": [3, 2]},
}
_HEAD = 8  # tokens with half of the mass
_PROB_EDGES = (1e-5, 1e-4, 1e-3, 1e-2, 0.05)  # of the cells by the draft's probability
_RATIO_EDGES = (0.9, 1.1)  # of the cells by the draft's probability relative to the target's
_PLACE = 64  # neighbouring tokens per cell by place; a vocabulary has a shorter last cell
_FLAT = 0.5  # standard deviation of the logits of a row without a head
_CONCENTRATIONS = torch.tensor([4.0, 32.0, 256.0, 2048.0], dtype=torch.float64)  # of the mixture


def chi_square(counts: IntArray, law: FloatArray) -> float:
    """Returns the p-value of counts[C] under ``law``[C]; 0 if a cell of probability 0 has counts.

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
    """Returns the total variation of counts[C] from ``law``[C], and its bound.

    For N counts drawn from ``law`` the mean is at most sqrt(cells / N) / 2, and by McDiarmid's
    inequality the mean is exceeded by t with probability at most exp(-2 N t ** 2).
    """
    num = int(counts.sum())
    mean = np.sqrt(np.count_nonzero(law) / num) / 2
    slack = np.sqrt(np.log(1 / false_alarm) / (2 * num))
    return float(np.abs(counts / num - law).sum() / 2), float(mean + slack)


def pair_laws(table: FloatArray, start: int, num_tokens: int) -> Iterator[FloatArray]:
    """Yields float64[V * V] per i: the exact joint law of tokens i and i + 1 after token ``start``.

    ``table`` is float64[V, V], the probability of the next token (column) after each (row).
    """
    marginal = table[start]
    for _ in range(num_tokens - 1):
        yield (marginal[:, None] * table).ravel()
        marginal = marginal @ table


def pair_counts(tokens: IntArray, vocab_size: int) -> Iterator[IntArray]:
    """Yields int64[V * V] per i: counts of each pair of tokens i and i + 1 in ``tokens``[N, T]."""
    for i in range(tokens.shape[1] - 1):
        cells = tokens[:, i] * vocab_size + tokens[:, i + 1]
        yield np.bincount(cells, minlength=vocab_size**2)


@dataclass(slots=True)
class _Findings:
    num_tests: int  # planned e-values; those still to come count as 0
    logs: list[tuple[str, float]] = field(default_factory=list)  # (test, log e-value)
    # (test, total variation, bound)
    distances: list[tuple[str, float, float]] = field(default_factory=list)

    def biased(self) -> list[str]:
        """Lists the tests that show a bias, worst first, at the false-alarm rate."""
        found = [
            f"{name}: total variation {distance:.3f}, at most {bound:.3f} by chance"
            for name, distance, bound in self.distances
            if distance > bound
        ]
        limit = math.log(2.0 * self.num_tests / FALSE_ALARM)  # of the sum of the e-values
        worst = sorted(self.logs, key=lambda test: -test[1])
        logs = torch.tensor([value for _, value in worst], dtype=torch.float64)
        if worst and logs.logsumexp(0) >= limit:
            found = [
                f"{name}: {10 ** min(value / math.log(10), 300):.0e} times as probable under"
                " another law"
                for name, value in worst
                if value >= min(limit, worst[0][1])
            ] + found
        return found

    @property
    def farthest(self) -> float:
        return max((distance for _, distance, _ in self.distances), default=0.0)


def distribution(subject: Subject) -> Check:
    if subject.claims is Lossless.TOKEN:
        return Check("distribution", None, "not needed: lossless token for token")
    exact = subject.claims is Lossless.DISTRIBUTION
    shapes: dict[str, dict[str, Any]] = {"as configured": {}}
    if exact and subject.build is compose:
        # Taking turns is part of the configuration; requests that share steps decode faster.
        serving = {**subject.small["serving"], "feeding": str(Feeding.DYNAMIC)}
        shapes |= {n: {"policy": policy, "serving": serving} for n, policy in _SHAPES.items()}
    vocabs = (_WIDE_VOCAB, _FULL_VOCAB) if subject.full else (_WIDE_VOCAB,)
    small = [(label, (TARGET_TABLE, OPPOSED_TABLE), params) for label, params in SAMPLINGS.items()]
    small.append(("crowded draft, t=1", CROWDED_TABLES, SAMPLINGS["t=1"]))
    per_shape = _NUM_WIDE_TESTS * len(vocabs) + len(small) * _NUM_TOKENS
    found = _Findings(num_tests=len(shapes) * per_shape)
    # The distances of each pair of neighbouring tokens share half of the rate.
    level = FALSE_ALARM / (2 * len(shapes) * len(small) * (_NUM_TOKENS - 1))
    for name, changes in shapes.items():
        try:
            for vocab_size in vocabs if exact else ():
                _test_wide(subject, vocab_size, name, changes, found)
            for label, tables, params in small if not exact or not found.biased() else ():
                _test_pairs(subject, f"{name}, {label}", tables, params, changes, level, found)
        except UserError:
            if not changes:
                raise
            continue  # the configured parts refuse this policy
        if exact and found.biased():
            break  # the tests to come cannot take it back
    if biased := found.biased():
        far = f"total variation up to {found.farthest:.3f}; " if found.distances else ""
        prefix = "not the target's law: " if exact else "lossy: "
        return Check("distribution", False, f"{prefix}{far}{joined_details(biased, limit=2)}")
    largest = max(value for _, value in found.logs)
    wide = f" of up to {vocabs[-1]} tokens" if exact else ""
    detail = (
        f"{len(found.logs)} laws{wide} at a false-alarm rate of"
        f" {FALSE_ALARM:.0e} in all: largest e-value {math.exp(largest):.2g}, total variation at"
        f" most {found.farthest:.3f}"
    )
    return Check("distribution", True, detail)


def _test_pairs(
    subject: Subject,
    name: str,
    tables: tuple[Table, Table],
    params: SamplingParams,
    changes: dict[str, Any],
    level: float,
    found: _Findings,
) -> None:
    """Tests the joint law of neighbouring tokens, and the law of the token after each other one."""
    target, draft = tables
    section = {"kind": "table", "target": target, "draft": draft}
    pair = TablePair(target=target, draft=draft)
    num_tokens = _NUM_TOKENS_SHAPES if changes else _NUM_TOKENS
    stop = StopRules(max_new_tokens=num_tokens)
    num_requests = subject.times * NUM_REQUESTS * (2 if tables is CROWDED_TABLES else 1)
    cases = [Case(i, "", (0,), params, stop) for i in range(num_requests)]
    with subject.composed(pair=pair, **{**changes, "model": section}) as parts:
        outputs = decode_cases(parts, cases, batch_size=_BATCH)
    tokens = np.array([outputs[case.id].output for case in cases])
    table = np.stack([reference_probs(np.array(row), params) for row in target])
    laws = pair_laws(table, 0, num_tokens)
    for i, (counts, law) in enumerate(zip(pair_counts(tokens, len(table)), laws, strict=True)):
        where = f"{name}, tokens {i} and {i + 1}"
        found.logs.append((where, log_evidence(counts, law)))
        distance, bound = total_variation(counts, law, false_alarm=level)
        found.distances.append((where, distance, bound))
    before = np.pad(tokens[:, :-1], ((0, 0), (1, 0)))  # 0: the prompt's token
    rows = [np.bincount(tokens[before == row], minlength=len(table)) for row in range(len(table))]
    # Given the tokens before them, tokens are independent, so e-values of rows multiply.
    value = sum(log_evidence(counts, law) for counts, law in zip(rows, table, strict=True))
    found.logs.append((f"{name}, the token after each", value))


def _test_wide(
    subject: Subject, vocab_size: int, name: str, changes: dict[str, Any], found: _Findings
) -> None:
    tables = wide_tables(vocab_size)
    pair = wide_pair(tables)
    section = {
        "kind": "table",
        "target": pair.target_table.tolist(),
        "draft": pair.draft_table.tolist(),
    }
    start = np.arange(subject.times * _WIDE_REQUESTS)
    batch_size = max(1, _WIDE_BATCH * _WIDE_VOCAB // vocab_size)  # rows of probabilities are large
    stop = StopRules(max_new_tokens=_WIDE_TOKENS)
    for label, params in WIDE_SAMPLINGS.items():
        cases = [Case(i, "", (int(token),), params, stop) for i, token in enumerate(start)]
        with subject.composed(pair=pair, **{**changes, "model": section}) as parts:
            outputs = decode_cases(parts, cases, batch_size=batch_size)
        tokens = np.array([outputs[case.id].output for case in cases])
        found.logs += [
            (f"{name}, {vocab_size} tokens, {label}, {kind}", value)
            for kind, value in wide_evidence(tables, params, start, tokens)
        ]


def wide_tables(vocab_size: int, seed: int = 0) -> dict[str, tuple[FloatArray, FloatArray]]:
    """Maps each kind of row to (target's logits[V], draft's logits[V]).

    Half of the mass lies on a few tokens and half on a long tail, and the draft is equal to the
    target, near it or far from it: small tables do not show what depends on a token's probability
    or on its position in a long row. A token's row is its id modulo the number of rows.
    """
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

    Output tokens are counted by the row of the token before them. Given that row they are
    independent draws of the target, wherever in a step or a tree they were decided.

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


def log_evidence(counts: IntArray, law: FloatArray) -> float:
    """Returns the natural logarithm of the e-value of counts[C] against ``law``[C].

    The mixture has Dirichlet laws with mean ``law`` and four concentrations, for alternatives that
    are far from it down to a few percent. Infinite if a cell of probability 0 has counts.
    """
    seen = np.flatnonzero(counts)
    if not law[seen].all():
        return math.inf
    number, probs = torch.from_numpy(counts[seen]).double(), torch.from_numpy(law[seen])
    prior = _CONCENTRATIONS[:, None] * probs  # [M, C]
    mixed = (torch.lgamma(prior + number) - torch.lgamma(prior)).sum(dim=1)
    mixed += torch.lgamma(_CONCENTRATIONS) - torch.lgamma(_CONCENTRATIONS + number.sum())
    ratio = mixed.logsumexp(0) - math.log(len(mixed)) - (number * probs.log()).sum()
    return float(ratio)
