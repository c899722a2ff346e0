"""What a new user meets first: one clear line each, and results as they are made."""

from __future__ import annotations

import numpy as np
import pytest

from specdec.config.job import run_job_of
from specdec.metrics import RequestResult, RunTotals
from specdec.pairs import RandomPair
from specdec.runs.runners import PartsRunner, TokenPrompt
from specdec.state import StopRules

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("strategy", "names"),
    [("mixture", "PromptLookupSource copies"), ("suffix", "SuffixSource copies")],
)
def test_methods_that_copy_text_say_that_synthetic_tokens_have_none(
    strategy: str, names: str
) -> None:
    words = [f"strategy={strategy}", "clock=simulated"]
    (notice,) = run_job_of([*words, "model=synthetic"]).notices
    assert names in notice
    assert "model=tiny" in notice
    assert not run_job_of([*words, "model=replay"]).notices
    assert not run_job_of(["strategy=best_first", "clock=simulated", "model=synthetic"]).notices


def test_results_of_a_batch_are_handed_out_as_each_request_ends() -> None:
    """The first of four requests is booked before the last one has a token."""
    pair = RandomPair()
    config = run_job_of(["strategy=ar", "model=random", "batch_size=2", "max_new_tokens=6"]).config
    runner = PartsRunner(cfg=config, pair=pair, stop=StopRules(max_new_tokens=6))
    prompts = [TokenPrompt(i, np.array([1 + i, 2])) for i in range(4)]
    ends: list[float] = []
    starts: dict[int, float] = {}

    def book(result: RequestResult, totals: RunTotals) -> None:
        ends.append(runner.parts.clock.now())
        starts[result.id] = result.emitted_s[0]

    runner.run(prompts, lambda _: None, book)
    runner.close()
    assert len(ends) == 4
    assert ends[0] < starts[3]
