"""PipeSpec's published asynchronous runs, predicted from its synchronous traces and pass times."""

import os
from functools import cache
from pathlib import Path
from statistics import mean

import numpy as np
import pytest

from experiments.open.pipespec import predicted_ms, read_runs, synchronous_runs

TRACES = Path(os.environ.get("SPECDEC_DATA", "")) / "acceptance_traces" / "pipespec"
SMALL, LARGE = (
    "Llama-3.2-1B-Instruct-Llama-3.1-8B-Instruct",
    ("Llama-3.2-1B-Instruct-Meta-Llama-3.1-70B-Instruct"),
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not os.environ.get("SPECDEC_DATA") or not TRACES.is_dir(),
        reason="SPECDEC_DATA names no folder with acceptance_traces/pipespec",
    ),
]


runs_of = cache(synchronous_runs)


def ratio(pair: str, lookahead: int, least: int) -> tuple[float, float]:
    """(predicted over published mean time per token, correlation over prompts)."""
    runs = runs_of(TRACES / f"chain_{pair}_8.json.gz", 7)
    ours = predicted_ms(runs, longest=7, least=least)
    measured = read_runs(TRACES / f"async-chain_{pair}_{lookahead}.json.gz")
    published = [1e3 * float(run["time_per_token"]) for run in measured]
    num = min(len(ours), len(published))
    together = float(np.corrcoef(ours[:num], published[:num])[0, 1])
    return mean(ours[:num]) / mean(published[:num]), together


@pytest.mark.parametrize(
    ("pair", "lookahead", "least"),
    [(LARGE, 0, 4), (SMALL, 8, 7)],
)
def test_within_10_per_cent(pair: str, lookahead: int, least: int) -> None:
    found, together = ratio(pair, lookahead, least)
    assert found == pytest.approx(1.0, abs=0.1)
    assert together > 0.85  # prompt by prompt, too


def test_a_target_that_never_gathers_tokens_is_told_apart() -> None:
    """A control: another waiting rule is outside."""
    assert ratio(LARGE, 0, 1)[0] > 1.1
