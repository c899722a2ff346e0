"""E-values against a law: their mean, what they find, and wide tables."""

import itertools
import math

import numpy as np
import pytest

from specdec.certify.laws import (
    ORDERS,
    log_evidence,
    partitions,
    place_evidence,
    places,
    row_evidence,
    table_model,
    wide_tables,
)
from specdec.certify.oracle import reference_probs
from specdec.errors import UserError
from specdec.pairs import TablePair, build_pair
from specdec.sampling.transform import SamplingParams

SAMPLING = SamplingParams(temperature=1.0)


@pytest.mark.parametrize("law", [[0.5, 0.5], [0.01, 0.99], [0.2, 0.3, 0.5], [0.0, 0.4, 0.6]])
def test_the_mean_of_an_e_value_is_one(law: list[float]) -> None:
    """Exactly, over all sequences: so it reaches 1 / a with probability at most a."""
    probs, mean = np.array(law), 0.0
    for sequence in itertools.product(np.flatnonzero(probs), repeat=5):
        counts = np.bincount(sequence, minlength=len(probs))
        mean += float(probs[list(sequence)].prod()) * math.exp(log_evidence(counts, probs))
    assert mean == pytest.approx(1.0, abs=1e-12)


def test_an_e_value_of_visits_that_stop_by_chance_keeps_its_mean() -> None:
    """The number of counts may depend on them, as the visits of a row do: here at a success."""
    law, mean = np.array([0.3, 0.7]), 0.0
    for failures in range(12):  # a success ends the draws, or the eleventh failure
        counts = np.array([int(failures < 11), failures])
        chance = 0.3 ** counts[0] * 0.7 ** counts[1]
        mean += float(chance) * math.exp(log_evidence(counts, law))
    assert mean == pytest.approx(1.0, abs=1e-12)


def test_an_e_value_finds_a_bias_and_a_token_that_cannot_be() -> None:
    rng = np.random.default_rng(3)
    law, other = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.3, 0.3])
    assert log_evidence(rng.multinomial(2000, law), law) < math.log(1e3)
    assert log_evidence(rng.multinomial(2000, other), law) > math.log(1e9)
    assert log_evidence(np.array([1, 0]), np.array([0.0, 1.0])) == math.inf
    assert log_evidence(np.array([0, 9]), np.array([0.0, 1.0])) == pytest.approx(0.0)


def test_wide_tables_have_small_probabilities_and_drafts_of_every_kind() -> None:
    tables = wide_tables(2024)
    probs = {k: [reference_probs(row, SAMPLING) for row in pair] for k, pair in tables.items()}
    for target, draft in probs.values():
        names = [name for name, _ in partitions(target, draft)]
        assert names == ["single tokens", "probabilities", "places", "ends"]
    target, draft = probs["equal"]
    assert (target == draft).all()
    assert target.max() > 0.02
    assert target[target < 1e-3].sum() > 0.3, "a tail that holds much of the mass"
    assert target[2024 // 64 * 64 :].sum() > 0.02, "a probable token after the last whole block"
    distance = {k: float(np.abs(p - q).sum() / 2) for k, (p, q) in probs.items()}
    assert 0.0 < distance["near"] < 0.2 < distance["far"]


def test_wide_evidence_reads_the_row_of_the_token_before() -> None:
    """Tokens of the right law pass; those of the draft's, row by row, do not."""
    tables, rng = wide_tables(400), np.random.default_rng(5)
    start = np.arange(600)
    found = {}
    laws = {k: [reference_probs(row, SAMPLING) for row in pair] for k, pair in tables.items()}
    for name, which in {"target": 0, "draft": 1}.items():
        rows = [pair[which] for pair in laws.values()]
        tokens, last = [], start
        for _ in range(3):
            last = np.array([rng.choice(400, p=rows[token % len(rows)]) for token in last])
            tokens.append(last)
        before = np.stack([start, *tokens[:-1]], axis=1) % len(rows)
        found[name] = dict(row_evidence(laws, before, np.stack(tokens, axis=1)))
    assert max(found["target"].values()) < math.log(1e4)
    assert found["draft"]["far, single tokens"] > math.log(1e9)
    assert found["draft"]["all rows, probabilities"] > math.log(1e9)
    assert found["draft"]["equal, probabilities"] < math.log(1e4), "that draft has the target's law"


def test_tables_with_fewer_rows_than_tokens() -> None:
    pair = build_pair(table_model(wide_tables(70)))
    assert (pair.vocab_size, len(pair.target_table)) == (70, 6)
    samples = pair.token_samples()
    assert samples.max() < 70
    with pytest.raises(UserError, match="at most as many rows as columns"):
        TablePair(target=[[0.0]] * 2, draft=[[0.0]] * 2)


def evidence_of_places(uniforms: np.ndarray) -> dict[str, float]:
    """Tokens at ``uniforms``[N, T] of the CDF of a law that depends on the token before."""
    rng = np.random.default_rng(8)
    laws = [np.array([0.5, 0.2, 0.2, 0.1]), np.array([0.1, 0.3, 0.1, 0.5])]
    draft, outputs = np.array([0.2, 0.2, 0.3, 0.3]), []
    for row in uniforms:
        before, found = 0, []
        for uniform in row:
            law = laws[before % 2]
            before = int(law.cumsum().searchsorted(uniform, side="right"))
            found.append(places((law, draft), before, rng))
        outputs.append(np.array(found))
    return dict(place_evidence(outputs))


def test_places_find_draws_that_are_shared_or_not_uniform() -> None:
    """Shared by two consecutive tokens, each of which has the right law by itself."""
    rng = np.random.default_rng(7)
    honest = rng.random((300, 4))
    assert max(evidence_of_places(honest).values()) < math.log(1e4)
    shared = evidence_of_places(honest[:, [0, 0, 2, 2]])
    assert shared[f"place by {ORDERS[0]}, given that of the token before"] > math.log(1e9)
    assert shared[f"place by {ORDERS[0]}"] < math.log(1e4)
    skewed = evidence_of_places(honest**1.6)
    assert skewed[f"place by {ORDERS[0]}"] > math.log(1e9)
