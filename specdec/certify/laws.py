"""Tests whether sampled output has the target's distribution; a *law* is a distribution.

``distribution`` decodes many requests, with different random numbers, by the whole strategy on
tables of logits (``TablePair``), whose laws are known exactly. ``configured_law`` (``numerics``)
does the same with the configured models. Both use the *e-values* below.

An e-value is a non-negative statistic whose mean is at most 1 if the tested law is true, so it
reaches 1 / a with probability at most a (docs/verify.md). Here it is the likelihood of the counts
under a mixture of laws around the tested one, divided by that under the law itself. The number of
counts may be random (a test martingale; Ramdas et al. 2023, "Game-theoretic statistics"), and the
mean of e-values is an e-value, even if they depend on each other.

Shape letters: V vocabulary, N requests, T tokens of an output, C cells of a law or of a partition
of the vocabulary, M concentrations of the mixture, O orders of the vocabulary.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.special import gammaln, logsumexp

from specdec.certify.cases import Case
from specdec.certify.oracle import reference_probs
from specdec.certify.report import Outcome, Skipped, joined_details
from specdec.certify.subject import Subject, decode_cases
from specdec.compose.workbench import compose
from specdec.errors import UserError
from specdec.sampling.transform import SamplingParams
from specdec.serving.feeding import Feeding
from specdec.state import StopRules
from specdec.types import FloatArray, IntArray, Lossless

Table = tuple[tuple[float, ...], ...]
"""Logits of the next token (column); the row is the last token's id modulo the number of rows."""

Rows = Mapping[str, tuple[FloatArray, FloatArray]]
"""Name of a row -> (target, draft): logits, or probabilities, float64[V] each."""

FALSE_ALARM = 1e-6  # of a check, over all of its tests

_WIDE_VOCAB = 8168  # not a multiple of the block size in which a row is summed
_FULL_VOCAB = 40_040  # with depth=full
_WIDE_REQUESTS, _WIDE_TOKENS = 600, 4
_BATCH = 25  # where requests take turns, each step has a cost per open request
_WIDE_BATCH = 60  # rows of probabilities are large

# Under top-k the target and the opposed draft each exclude tokens that the other keeps.
TARGET_TABLE: Table = (
    (2.0, 1.0, 0.0, 0.5, -1.0),
    (0.0, 1.5, 1.4, -0.5, 0.7),
    (-1.0, 0.2, 2.0, 1.0, 0.3),
    (1.0, 0.9, 0.8, 0.7, 2.5),
    (0.1, 2.2, -0.4, 1.1, 0.6),
)

OPPOSED_TABLE: Table = (  # a draft that prefers other tokens
    (1.0, 4.0, 0.6, -2.0, 2.0),
    (3.0, 0.0, 2.0, 0.8, 0.2),
    (2.0, 0.6, 2.0, 0.4, -1.0),
    (0.8, 4.0, 0.2, 3.0, 2.0),
    (2.0, 2.0, 1.8, -0.6, 2.4),
)


def _tables(*shares: tuple[Sequence[float], Sequence[float]]) -> tuple[Table, Table]:
    """Returns logits of (target, draft) from rows of their probabilities in percent."""
    target, draft = (
        tuple(tuple(math.log(share / 100) for share in row) for row in rows)
        for rows in zip(*shares, strict=True)
    )
    return target, draft


# The draft favours few tokens, which are often rejected. Each row shows another fault of the tests
# of later siblings: a shared draw, a residual not updated, a draft not renormalised.
CROWDED_TABLES = _tables(
    ((51, 19, 18, 4, 8), (10, 0.4, 1, 42.6, 46)),
    ((13, 33, 9, 38, 7), (32, 0.6, 6, 7, 54.4)),
    ((18, 22, 20, 21, 19), (33, 2, 37, 1, 27)),
    ((37, 2, 41, 4, 16), (1, 62, 26, 9, 2)),
    ((24, 8, 22, 9, 37), (31.4, 1.3, 35.8, 18.4, 13.1)),
)
# Every token has the same distribution, so reused random numbers show as equal tokens. The draft is
# sure of one token only, so that a choice of early exits by the drawn token shows.
ONE_LAW_TABLES = _tables(((21, 8, 11, 21, 39), (4, 8, 56, 13, 19)))

_STARTS = (0, 2, 0, 1, 0, 2)  # rows of the prompts' last tokens: each is needed often enough
_T1 = SamplingParams(temperature=1.0)
_FILTERED = SamplingParams(temperature=0.8, top_k=4, top_p=0.95)
# Name -> ((target, draft), parameters, number of requests, tokens of each).
_SMALL_TABLES = {
    "opposed draft, t=0.8 top_k=4 top_p=0.95": ((TARGET_TABLE, OPPOSED_TABLE), _FILTERED, 400, 3),
    "crowded draft, t=1": (CROWDED_TABLES, _T1, 1500, 3),
    "one law, t=1": (ONE_LAW_TABLES, _T1, 700, 7),
}
_WIDE_SAMPLINGS = {
    "t=1": _T1,
    "t=1.2 top_k=1000 top_p=0.99": SamplingParams(temperature=1.2, top_k=1000, top_p=0.99),
}
_CHAIN = "a chain of 6"
_SHAPES: dict[str, dict[str, Any]] = {
    _CHAIN: {"_target_": "specdec.policies.Chain", "gamma": 6},
    "a tree of 4, 2": {"_target_": "specdec.policies.Static", "branching": [4, 2]},
}
SINGLE = "single tokens"
_HEAD = 8  # tokens with half of the mass
_PROB_EDGES = (1e-5, 1e-4, 1e-3, 1e-2, 0.05)  # of the cells by the draft's probability
_RATIO_EDGES = (0.9, 1.1)  # of the cells by the draft's probability relative to the target's
_PLACE = 64  # neighbouring tokens per cell by place; a vocabulary has a shorter last cell
_FLAT = 0.5  # standard deviation of the logits of a row without a head
_CONCENTRATIONS = np.array([4.0, 32.0, 256.0, 2048.0])  # of the mixture


def log_evidence(counts: IntArray, law: FloatArray) -> float:
    """Returns the natural logarithm of the e-value of counts[C] against probabilities ``law``[C].

    The alternative is a mixture of Dirichlet distributions of mean ``law`` and four concentrations,
    for deviations from large down to a few percent. Infinite if a cell of probability 0 has counts.
    """
    seen = np.flatnonzero(counts)
    number, probs = counts[seen], law[seen]
    if not probs.all():
        return math.inf
    prior = _CONCENTRATIONS[:, None] * probs  # [M, C]
    mixed = (gammaln(prior + number) - gammaln(prior)).sum(axis=1)
    mixed += gammaln(_CONCENTRATIONS) - gammaln(_CONCENTRATIONS + number.sum())
    return float(logsumexp(mixed) - math.log(len(mixed)) - (number * np.log(probs)).sum())


@dataclass(slots=True)
class Evidence:
    num_tests: int  # planned; those that are not done count as e-values of 0
    logs: list[tuple[str, float]] = field(default_factory=list)  # (test, log e-value)

    def biased(self) -> list[str]:
        """Lists the tests that show a bias, worst first, at the false-alarm rate of the check."""
        limit = math.log(self.num_tests / FALSE_ALARM)  # of the sum of the e-values
        worst = sorted(self.logs, key=lambda test: -test[1])
        if not worst or logsumexp([value for _, value in worst]) < limit:
            return []
        shown = [test for test in worst if test[1] >= min(limit, worst[0][1])]
        factors = [10 ** min(value / math.log(10), 300) for _, value in shown]
        text = "times as probable under another law"
        return [f"{name}: {n:.0e} {text}" for (name, _), n in zip(shown, factors, strict=True)]

    @property
    def passed(self) -> str:
        assert len(self.logs) <= self.num_tests, "more tests than planned"
        tests = f"{len(self.logs)} tests at a false-alarm rate of {FALSE_ALARM:.0e} in all"
        return f"{tests}: largest e-value {math.exp(max(value for _, value in self.logs)):.2g}"


ORDERS = ("token ids", "the target's probabilities", "the draft's relative probabilities")
NUM_PLACE_TESTS = 3 * len(ORDERS)


def places(
    laws: tuple[FloatArray, FloatArray | None], token: int, rng: np.random.Generator
) -> FloatArray:
    """Returns float64[O], a token's position in the target's CDF with tokens in each of ``ORDERS``.

    ``laws`` are the distributions of target and draft, float64[V]. ``rng`` chooses the position
    within the token's own interval (a randomised probability integral transform), so positions are
    uniform in [0, 1) and independent of earlier ones if tokens were sampled from the target.
    Without a draft, the third order is that of the token ids.
    """
    target, draft = laws
    ids, mass = np.arange(len(target)), float(target[token])
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = ids if draft is None else np.nan_to_num(draft / target, nan=0.0)
    below = [
        float(target[(key < key[token]) | ((key == key[token]) & (ids < token))].sum())
        for key in (ids, target, relative)
    ]
    found: FloatArray = np.minimum(np.array(below) + rng.random() * mass, 1.0 - 1e-12)
    return found


def place_evidence(outputs: Sequence[FloatArray]) -> Iterator[tuple[str, float]]:
    """Yields (description, log e-value) of tests of ``outputs``, CDF positions[T, O] by ``places``.

    For each order of the vocabulary, tests whether positions are uniform, and whether they
    depend on the position one or two tokens before, as if tokens shared a random number.
    """
    for column, order in enumerate(ORDERS):
        series = [places[:, column] for places in outputs]
        counts = np.bincount((16 * np.concatenate(series)).astype(int), minlength=16)
        yield f"place by {order}", log_evidence(counts, np.full(16, 1 / 16))
        for lag, before in ((1, "the token before"), (2, "the one before the last")):
            pairs = np.zeros(16, np.int64)
            for place in series:
                cells = (4 * place).astype(int)
                pairs += np.bincount(4 * cells[:-lag] + cells[lag:], minlength=16)
            # Given the earlier place the later one is uniform, so e-values of rows multiply.
            value = sum(log_evidence(row, np.full(4, 1 / 4)) for row in pairs.reshape(4, 4))
            yield f"place by {order}, given that of {before}", value


def distribution(subject: Subject) -> Outcome:
    if subject.claims is Lossless.TOKEN:
        raise Skipped("not needed: lossless token for token")
    exact = subject.claims is Lossless.DISTRIBUTION
    shapes: dict[str, dict[str, Any]] = {"as configured": {}}
    if exact and subject.build is compose:
        # Taking turns is part of the configuration; requests that share steps decode faster.
        serving = {**subject.small["serving"], "feeding": str(Feeding.DYNAMIC)}
        shapes |= {n: {"policy": policy, "serving": serving} for n, policy in _SHAPES.items()}
    vocabs = (_WIDE_VOCAB, _FULL_VOCAB)[: 1 + subject.full]
    per_shape = len(_SMALL_TABLES) * (1 + len(TARGET_TABLE) + NUM_PLACE_TESTS)
    per_shape += len(vocabs) * len(_WIDE_SAMPLINGS) * (7 * 4 + NUM_PLACE_TESTS)
    found, farthest = Evidence(num_tests=len(shapes) * per_shape), 0.0
    for name, changes in shapes.items():
        wide = vocabs if exact and name != _CHAIN else ()
        try:
            for label, tables, cases, size in _tests(subject, wide, configured=not changes):
                if exact and found.biased():
                    break  # the tests to come cannot take it back
                with subject.composed(model=table_model(tables), **changes) as parts:
                    outputs = decode_cases(parts, cases, batch_size=size)
                tokens = np.array([outputs[case.id].output for case in cases])
                distance = _test(found, f"{name}, {label}", tables, cases, tokens, subject.seed)
                farthest = max(farthest, distance)
        except UserError:
            if not changes:
                raise  # the configured parts refuse only other policies
    if biased := found.biased():
        prefix = "not the target's law" if exact else "lossy"
        far = f"{prefix}: total variation up to {farthest:.3f}"
        return False, f"{far}; {joined_details(biased, limit=2)}"
    sizes = f"vocabularies of up to {vocabs[-1]} tokens" if exact else "small tables"
    return True, f"{sizes}, {found.passed}"


def _tests(
    subject: Subject, vocabs: Sequence[int], *, configured: bool
) -> Iterator[tuple[str, Rows, list[Case], int]]:
    """Yields tests (label, tables, requests, batch size), more for the ``configured`` policy."""

    def cases(start: IntArray, params: SamplingParams, num_tokens: int) -> list[Case]:
        stop, last = StopRules(max_new_tokens=num_tokens), np.tile(start, subject.times)
        return [Case(i, "", (token,), params, stop) for i, token in enumerate(last.tolist())]

    for label, (pair, params, num, num_tokens) in _SMALL_TABLES.items():
        if configured or pair is not ONE_LAW_TABLES:  # shows faults of sources, whatever the policy
            rows = enumerate(zip(*map(np.array, pair), strict=True))
            tables = {f"the token after {row}": both for row, both in rows}
            size = _BATCH if configured else 8 * _BATCH
            yield label, tables, cases(np.resize(_STARTS, num), params, num_tokens), size
    for vocab_size in vocabs:
        size = max(1, _WIDE_BATCH * _WIDE_VOCAB // vocab_size)
        for label, params in list(_WIDE_SAMPLINGS.items())[0 if configured else -1 :]:
            wide = cases(np.arange(_WIDE_REQUESTS), params, _WIDE_TOKENS)
            yield f"{vocab_size} tokens, {label}", wide_tables(vocab_size), wide, size


def _test(
    found: Evidence, name: str, tables: Rows, cases: Sequence[Case], tokens: IntArray, seed: int
) -> float:
    """Adds e-values of the outputs ``tokens``[N, T] to ``found``. Returns the total variation
    between the distributions of output and target given the token before; 0 for large vocabularies.
    """
    params, rng, series = cases[0].sampling, np.random.default_rng(seed), list[FloatArray]()
    laws = {
        row: (reference_probs(target, params), reference_probs(draft, params))
        for row, (target, draft) in tables.items()
    }
    rows, start = list(laws.values()), np.array([case.prompt for case in cases])
    before = np.concatenate([start, tokens[:, :-1]], axis=1) % len(rows)
    values = list(row_evidence(laws, before, tokens))
    if not np.isinf([value for _, value in values]).any():
        for row in np.stack([before, tokens], axis=2).tolist():
            series.append(np.array([places(rows[at], token, rng) for at, token in row]))
        values += place_evidence(series)
    found.logs += [(f"{name}, {kind}", value) for kind, value in values]
    far = 0.0
    for at, (law, _) in enumerate(rows):
        drawn = np.bincount(tokens[before == at], minlength=len(law))
        far += np.abs(drawn - law * drawn.sum()).sum() if len(law) <= _PLACE else 0.0
    return float(far) / 2 / tokens.size


def row_evidence(laws: Rows, before: IntArray, tokens: IntArray) -> Iterator[tuple[str, float]]:
    """Yields (description, log e-value) per table row and vocabulary partition, and over all rows.

    Output ``tokens``[N, T] are counted by their row of the table, ``before``[N, T], which the token
    before them selects. Given the row, a lossless strategy's tokens are independent target samples.
    """
    together: dict[str, float] = {}
    for row, (kind, (target, draft)) in enumerate(laws.items()):
        drawn = tokens[before == row]
        for name, cells in partitions(target, draft):
            law: FloatArray = np.bincount(cells, weights=target).astype(np.float64)
            value = log_evidence(np.bincount(cells[drawn], minlength=len(law)), law)
            together[name] = together.get(name, 0.0) + value
            yield f"{kind}, {name}", value
    for name, value in together.items():  # given the rows, the counts are independent
        yield f"all rows, {name}", value


def wide_tables(vocab_size: int, seed: int = 0) -> Rows:
    """Returns rows of logits of a large vocabulary; a token's row is its id modulo their number.

    In most rows half of the mass lies on a few tokens and half on a long tail, so that faults show
    which depend on a token's probability or on its place in a long row.
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


def table_model(tables: Rows) -> dict[str, Any]:
    """Returns the ``model`` section of a ``TablePair``."""
    target, draft = (np.stack(rows).tolist() for rows in zip(*tables.values(), strict=True))
    return {"kind": "table", "target": target, "draft": draft}


def partitions(target: FloatArray, draft: FloatArray) -> Iterator[tuple[str, IntArray]]:
    """Yields partitions of the vocabulary: (name, int64[V], the cell of each token)."""
    ids = np.arange(len(target))
    yield SINGLE, ids
    if len(ids) <= _PLACE:
        return  # the counts of the single tokens show all
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.searchsorted(_RATIO_EDGES, np.nan_to_num(draft / target, nan=1.0, posinf=2.0))
    yield "probabilities", np.searchsorted(_PROB_EDGES, draft) * (len(_RATIO_EDGES) + 1) + ratio
    place = ids // _PLACE
    yield "places", place
    yield "ends", np.where(place == 0, 1, 0) + np.where(place == place[-1], 2, 0)
