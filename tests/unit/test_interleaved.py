"""Strategies in turns give the tokens of separate runs, and count no time of the others.

And results of a batch are there as each request ends.
"""

from collections.abc import Callable
from time import perf_counter, sleep

import pytest

from specdec.metrics import RequestResult, RunTotals
from specdec.runs import runners as interleaved
from specdec.runs.runners import PartsRunner
from specdec.state import DecodeState, StopRules
from tests.distributed.support import PROMPTS, config, pair

NAMES = ("ar", "specinfer", "best_first")
TOKENS = 12


def _runners(on_step: Callable[[DecodeState], None] | None = None) -> list[PartsRunner]:
    made = []
    for name in NAMES:
        cfg = config(name, 1)
        cfg["executor"]["transport"] = "in_process"
        cfg["clock"] = {"kind": "measured"}
        cfg["batch_size"] = 2
        stop = StopRules(max_new_tokens=TOKENS)
        made.append(PartsRunner(cfg=cfg, pair=pair(), stop=stop, on_step=on_step))
    return made


def _outputs(results: list[RequestResult]) -> dict[int, tuple[int, ...]]:
    return {result.id: result.output for result in results}


@pytest.mark.slow
def test_tokens_are_those_of_separate_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step per turn, so that every step follows one of another strategy."""
    monkeypatch.setattr(interleaved, "TURN_S", 0.0)
    found = interleaved.run_interleaved(_runners(), PROMPTS)
    for runner, (results, totals) in zip(_runners(), found, strict=True):
        expected: list[RequestResult] = []
        counts = runner.run(PROMPTS, expected.append)
        assert _outputs(results) == _outputs(expected)
        assert (totals.steps, totals.target_rows) == (counts.steps, counts.target_rows)


def test_each_clock_has_its_own_turns_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of all strategies add up to the whole, not to a multiple of it."""
    monkeypatch.setattr(interleaved, "TURN_S", 0.0)
    runners = _runners(lambda _: sleep(0.002))  # a step takes at least this
    began = perf_counter()
    found = interleaved.run_interleaved(runners, PROMPTS)
    assert sum(totals.clock_s for _, totals in found) <= perf_counter() - began
    for results, totals in found:
        last = max(result.emitted_s[-1] - result.arrival_s for result in results)
        assert last <= totals.clock_s + 1e-3


def test_results_of_a_batch_are_handed_out_as_each_request_ends() -> None:
    """The first of the requests is booked before the last one has a token."""
    runner = _runners()[0]
    ends: list[float] = []
    starts: list[float] = []

    def book(result: RequestResult, totals: RunTotals) -> None:
        ends.append(runner.parts.clock.now())
        starts.append(result.emitted_s[0])

    runner.run(PROMPTS, lambda _: None, book)
    assert len(ends) == len(PROMPTS) > 2, "more than are decoded at once"
    assert ends[0] < starts[-1]
