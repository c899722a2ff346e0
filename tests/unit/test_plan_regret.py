"""The figures of ``experiments.plan.regret``: regret, error, shares."""

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from experiments.plan import regret, regret_table

CASES = regret.cases(quick=False)


def result(first: float, best: float, planned: float) -> dict[str, Any]:
    """A case whose first choice and best candidate have these tokens per second."""
    names: list[tuple[str, dict[str, int], float | None, float]] = [
        ("best_first", {"bs": 8}, planned, first),
        ("speculative", {}, None, best),
        ("ar", {}, 50.0, 40.0),
    ]
    return {
        "case": asdict(CASES[0]),
        "candidates": [
            {"strategy": n, "sizes": s, "planned_tokens_per_s": p, "measured_tokens_per_s": m}
            for n, s, p, m in names
        ],
    }


@pytest.mark.parametrize(
    ("first", "best", "lost"), [(100.0, 90.0, 0.0), (100.0, 100.0, 0.0), (80.0, 100.0, 0.25)]
)
def test_regret_is_time_of_the_first_choice_over_the_best(
    first: float, best: float, lost: float
) -> None:
    assert regret_table.regret(result(first, best, 100.0)) == pytest.approx(lost)


def test_shares_count_cases_within_the_bars() -> None:
    results = [
        result(100.0, 104.9, 109.9),  # both just within
        result(100.0, 105.1, 90.1),
        result(100.0, 100.0, 110.1),
        result(100.0, 100.0, 89.9),
    ]
    assert [round(regret_table.error(r), 3) for r in results] == [0.099, -0.099, 0.101, -0.101]
    told = regret_table.shares(results)
    assert told.startswith("4 cases: regret at most 5 % in 75 % (wanted 90 %)")
    assert ", tokens/s within 10 % in 50 % (wanted 80 %)" in told
    # The planned gain is over 50 tokens/s, the measured one over 40.
    assert [round(regret_table.gain_error(r), 3) for r in results] == [
        -0.121,
        -0.279,
        -0.119,
        -0.281,
    ]
    assert told.endswith("gains over plain decoding within 10 % in 0 %")


def _with_turns(speeds: list[float], noise: float, seed: int) -> dict[str, Any]:
    """Candidates of these tokens per second in 18 turns of 64 tokens, with relative noise."""
    rng = np.random.default_rng(seed)
    seconds = (
        64.0 / np.array(speeds)[:, None] * np.exp(noise * rng.standard_normal((len(speeds), 18)))
    )
    turns = [[(float(s), 64) for s in of] for of in seconds]
    return {"candidates": [{"turns": t} for t in turns]}


def test_a_regret_beyond_doubt() -> None:
    """Identical candidates have one in at most 5 % of cases, a slow first choice always."""
    found = [regret_table.least_regret(_with_turns([100.0] * 8, 0.1, seed)) for seed in range(60)]
    # At a rate of 5 % more than 9 of 60 occur with a probability of 1e-3.
    assert sum(least > 0.0 for least in found if least is not None) <= 9
    slow = regret_table.least_regret(_with_turns([100.0, *[100.0] * 6, 130.0], 0.1, 0))
    assert slow is not None
    assert 0.1 < slow < 0.3
    assert regret_table.least_regret(result(1.0, 2.0, 3.0)) is None
