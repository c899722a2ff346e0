"""Metrics: definitions on hand-computed counts, invariants, parity that cannot be fooled."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.metrics import (
    RequestResult,
    Run,
    RunTotals,
    comparison_row,
    loop_share,
    lossless_against,
    speed_ratio_interval,
    summarise,
)
from specdec.metrics.counters import RequestCounters
from specdec.metrics.times import decode_phase


def make_result(
    chunks: Sequence[Sequence[int]],
    *,
    times: Sequence[float] | None = None,
    prompt_id: int = 0,
    proposed: int = 0,
    cut: int = 0,
    level: bool = False,
    hits: int = 0,
    admitted: float = 0.0,
    arrival: float = 0.0,
) -> RequestResult:
    """A request whose answers emitted ``chunks`` at ``times``; the last lost ``cut`` tokens."""
    times = times if times is not None else [float(i + 1) for i in range(len(chunks))]
    output = [token for chunk in chunks for token in chunk]
    lengths = [len(chunk) for chunk in chunks]
    lengths[-1] += cut
    counters = RequestCounters(
        answers=len(chunks),
        accepted=sum(lengths) - len(chunks),
        hits=hits,
        misses=len(chunks) - hits,
        verified=sum(lengths),
        proposed=proposed,
        cut_tokens=cut,
        path_lengths=Counter(lengths),
    )
    for length in lengths:
        counters.accepted_by_depth.update(range(1, length))
        counters.judged_by_depth.update(range(1, length + 1))
    origins = [o for chunk in chunks for o in [*[0] * (len(chunk) - 1), -1]]
    if level:
        origins = [0] * hits + [-1] * (len(chunks) - hits)
    return RequestResult(
        id=prompt_id,
        num_prompt=5,
        output=tuple(output),
        origins=tuple(origins),
        finish_reason="length",
        text="",
        emitted_s=tuple(t for chunk, t in zip(chunks, times, strict=True) for _ in chunk),
        arrival_s=arrival,
        admitted_s=admitted,
        counters=counters,
    )


def test_definitions_on_a_hand_computed_run() -> None:
    """Two requests: answers of 3, 1, 2 tokens, and one of 4 of which 2 were cut."""
    first = make_result([[1, 2, 3], [4], [5, 6]], times=[2.0, 3.0, 5.0], proposed=9, admitted=1.5)
    second = make_result([[1, 2]], times=[6.0], prompt_id=1, proposed=3, cut=2, arrival=-1.0)
    totals = RunTotals(
        steps=5,
        target_passes=4,
        target_rows=16,
        draft_passes=8,
        wall_s=10.0,
        clock_s=10.0,
        model_s={"target": 6.0, "draft": 2.0},
        wait_s=1.0,
        target_bytes=100,
        draft_bytes=10,
    )
    found = summarise([first, second], totals)
    assert found["new_tokens"] == 8
    assert found["steps_per_token"] == 5 / 8
    assert found["acceptance_length"] == 8 / 4  # emitted per answer; the cut tokens are not
    # Accepted: 2 + 0 + 1, and 3 of which one was cut together with the token after the path.
    assert found["accepted_per_pass"] == (3 + 2) / 4
    assert found["acceptance_rate"] == 6 / 12
    assert found["acceptance_rate_verified"] == 6 / 10
    assert found["wasted_nodes"] == 6
    assert found["cut_tokens"] == 2
    assert found["hit_rate"] is None
    # Decoding starts with the first emission: 3 tokens in 3 seconds; the second has no such phase.
    assert found["tokens_per_s"] == 3 / 3.0
    assert found["tbt_ms_mean"] == pytest.approx(1000.0)
    assert found["tbt_ms_p50"] == pytest.approx(1000.0)  # gaps 1, 2, 0 seconds
    assert found["ttft_ms"] == pytest.approx(1e3 * (0.5 + 6.0) / 2)
    assert found["queue_ms"] == pytest.approx(1e3 * (1.5 + 1.0) / 2)
    assert found["throughput_tokens_per_s"] == pytest.approx(0.8)
    assert found["overhead_share"] == pytest.approx(0.1)
    assert found["overhead_ms_per_step"] == pytest.approx(200.0)
    assert found["relative_memory_traffic"] == (4 * 100 + 8 * 10) / (8 * 100)
    assert found["rows_per_target_pass"] == 4
    assert found["acceptance_by_depth"] == {"1": 3 / 4, "2": 2 / 3, "3": 1 / 2, "4": 0.0}
    assert found["path_lengths"] == {"1": 1, "2": 1, "3": 1, "4": 1}
    assert found["tokens_by_origin"] == {"-1": 4, "0": 4}
    assert found["bubble_share"] is None
    assert found["clock"] == "measured"
    json.dumps(found, allow_nan=False)


def test_one_level_per_step_counts_hits_as_acceptance() -> None:
    result = make_result([[i] for i in range(5)], level=True, hits=3, proposed=12)
    totals = RunTotals(
        steps=10,
        target_passes=10,
        latency=4,
        level_per_step=True,
        whole_tree=False,
        clock="simulated",
        clock_s=20.0,
        wall_s=2.0,
        stage_busy_s={1: 15.0, 2: 10.0},
        draft_total_s=4.0,
        draft_hidden_s=3.0,
    )
    found = summarise([result], totals)
    assert found["hit_rate"] == 3 / 5
    assert found["acceptance_rate"] == 3 / 12
    assert found["acceptance_rate_verified"] == 3 / (5 + 3)  # 5 rejected siblings, 3 hits
    assert found["acceptance_by_depth"] == {}
    assert found["acceptance_length"] is None
    assert found["accepted_per_pass"] is None
    assert found["bubble_share"] == {"1": 0.25, "2": 0.5}
    assert found["draft_hidden_share"] == 0.75
    assert found["overhead_share"] is None, "no model was called: a replay is not all overhead"
    assert found["clock"] == "simulated"


def test_a_hit_in_flight_is_an_accepted_draft_token_at_any_number_of_levels() -> None:
    """A whole tree that was answered has nothing in flight: there a hit was proposed by nobody."""
    result = make_result([[1, 2, 3], [4], [5, 6]], proposed=12)
    result.counters.hits, result.counters.misses = 2, 1
    judged = result.counters.verified
    found = summarise([result], RunTotals(latency=4, whole_tree=False))
    assert (found["accepted_tokens"], found["wasted_nodes"]) == (3 + 2, 12 - 5)
    assert found["acceptance_rate_verified"] == 5 / (judged + 2)
    assert found["accepted_per_pass"] == 3 / 3
    assert summarise([result], RunTotals())["accepted_tokens"] == 3


@pytest.mark.parametrize(
    "broken",
    [
        {"accepted": 4},
        {"answers": 4},
        {"hits": 1},
        {"cut_tokens": 1},
        {"path_lengths": Counter({2: 2, 1: 1})},
        {"accepted_by_depth": Counter({1: 2})},
        {"judged_by_depth": Counter({1: 1, 2: 1})},
    ],
)
def test_contradicting_counts_are_caught(broken: dict[str, object]) -> None:
    result = make_result([[1, 2, 3], [4], [5, 6]])
    summarise([result], RunTotals())
    for name, value in broken.items():
        setattr(result.counters, name, value)
    with pytest.raises(AssertionError):
        summarise([result], RunTotals())


def test_empty_and_instant_runs_give_none_not_errors() -> None:
    found = summarise([], RunTotals())
    undefined = ("tokens_per_s", "tbt_ms_p99", "acceptance_length", "loop_share", "steps_per_token")
    assert all(found[name] is None for name in undefined)
    found = summarise([make_result([[1], [2]], times=[1.0, 1.0])], RunTotals())
    assert found["tokens_per_s"] is None
    assert found["tbt_ms_mean"] is None


@given(st.lists(st.tuples(st.integers(1, 5), st.floats(1e-3, 2.0)), min_size=2, max_size=20))
def test_mean_time_between_tokens_is_the_inverse_of_the_decode_speed(
    answers: list[tuple[int, float]],
) -> None:
    times = np.cumsum([gap for _, gap in answers]).tolist()
    result = make_result([list(range(n)) for n, _ in answers], times=times)
    found = summarise([result], RunTotals())
    assert found["tbt_ms_mean"] * found["tokens_per_s"] == pytest.approx(1e3)
    phase = decode_phase(result)
    assert phase.tokens == len(result.output) - answers[0][0]
    assert phase.gaps_s.sum() == pytest.approx(phase.seconds)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=80), st.integers(1, 8))
def test_loop_share_equals_its_definition(tokens: list[int], n: int) -> None:
    grams = [tuple(tokens[end - n : end]) for end in range(n, len(tokens) + 1)]
    repeated = sum(gram in grams[:i] for i, gram in enumerate(grams))
    assert loop_share([tokens], n) == repeated / len(tokens)


def test_parity_counts_truncated_and_missing_answers_as_different() -> None:
    """A peer compared two files with zip, so that a truncated one was equal."""
    ar = [make_result([[1], [2], [3]], prompt_id=i) for i in range(3)]
    short, longer = (
        make_result(chunks, prompt_id=1) for chunks in ([[1], [2]], [[1], [2], [3], [4]])
    )
    other = make_result([[1], [9], [3]])

    def differing(rows: list[RequestResult], plain: list[RequestResult]) -> list[tuple]:
        parity = lossless_against(rows, plain)
        assert parity["lossless"] is not bool(parity["differing"])
        return [tuple(token.values()) for token in parity["differing"]]

    assert differing(ar, ar) == []
    assert differing([ar[0], short, ar[2]], ar) == [(1, 2, None, 3)]
    assert differing([ar[0], longer, ar[2]], ar) == [(1, 3, 4, None)]
    assert differing([other, *ar[1:]], ar) == [(0, 1, 9, 2)]
    assert differing(ar[:2], ar) == differing(ar, ar[:2]) == [(2, -1, None, None)]
    assert len(differing([], ar)) == 3


def test_reference_that_differs_from_itself_is_refused() -> None:
    with pytest.raises(ValueError, match="not deterministic"):
        lossless_against([], [make_result([[1]]), make_result([[2]])])


def timed_run(gap: float, *, tokens: int = 10, prompts: int = 4, chunk: int = 1, **flags) -> Run:
    results = []
    for i in range(prompts):
        count = tokens // chunk
        times = [0.5 + gap * (1 + 0.1 * i) * k for k in range(count)]
        chunks = [list(range(k * chunk, (k + 1) * chunk)) for k in range(count)]
        results.append(make_result(chunks, times=times, prompt_id=i))
    totals = RunTotals(target_passes=prompts * tokens // chunk, steps=1, **flags)
    return Run(tuple(results), totals)


def test_comparison_row_takes_medians_of_paired_repeats() -> None:
    ar = [timed_run(0.10), timed_run(0.20), timed_run(0.40)]
    mine = [timed_run(0.05), timed_run(0.05), timed_run(0.10)]
    row = comparison_row("x", mine, ar)
    assert row["speedup_wall"] == pytest.approx(4.0)  # of 2, 4, 4
    assert row["speedup_wall_range"] == pytest.approx([2.0, 4.0])
    assert row["lossless"] is True
    assert row["num_compared"] == 12
    assert row["repeats"] == 3
    assert row["new_tokens"] == 40
    assert row["tokens_per_s"] == pytest.approx(
        36 / sum(0.05 * 9 * (1 + 0.1 * i) for i in range(4))
    )
    assert comparison_row("ar", ar, ar)["speedup_wall"] == 1.0
    assert comparison_row("x", mine)["lossless"] is None
    with pytest.raises(ValueError, match="3 repeats"):
        comparison_row("x", mine, ar[:1])
    lossy = comparison_row("x", mine, ar, claims="lossy")
    assert lossy["lossless"] is None
    json.dumps(row, allow_nan=False)


def test_medians_of_paired_ratios() -> None:
    """One prompt that took 30 times its time moves the sums, and not the median."""
    ar, mine = timed_run(0.2), timed_run(0.1)
    slow = list(ar.results)
    slow[0] = make_result([[k] for k in range(10)], times=[6.0 * k for k in range(10)])
    row = comparison_row("x", [mine], [replace(ar, results=tuple(slow))])
    assert row["speedup_wall"] > 10
    assert row["speedup_prompt_median"] == pytest.approx(2.0)
    low, high = row["speedup_prompt_median_interval"]
    assert low == pytest.approx(2.0)
    assert high > 2.0
    assert comparison_row("x", [mine])["speedup_prompt_median"] is None
    one = [timed_run(gap, prompts=1) for gap in (0.1, 0.4)]
    row = comparison_row("x", one, [timed_run(0.2, prompts=1)] * 2)
    assert row["speedup_prompt_median"] == pytest.approx(1.25)
    assert row["speedup_prompt_median_interval"] is None


def test_times_of_two_clocks_are_never_divided() -> None:
    row = comparison_row("x", [timed_run(0.1, clock="simulated")], [timed_run(0.2)])
    assert row["speedup_wall"] is None
    assert row["speedup_theoretical"] is None


@pytest.mark.parametrize("clock", ["measured", "paced", "simulated"])
def test_theoretical_speedup_is_one_law_on_every_clock(clock: str) -> None:
    """Turns of a way through the target each, by ar's time, and drafting that was not hidden."""
    ar = [timed_run(0.1, clock=clock)]
    t = 1.0 / summarise(ar[0].results, ar[0].totals)["tokens_per_s"]

    def theory(**flags: object) -> float:
        mine = timed_run(0.1, chunk=2, clock=clock)
        for name, value in flags.items():
            setattr(mine.totals, name, value)
        return comparison_row("x", [mine], ar)["speedup_theoretical"]

    assert theory() == pytest.approx(2.0)
    # Whose layers a source computes with does not matter, only that it drafted.
    assert theory(model_s={"target": 99.0}, draft_total_s=1.0) == pytest.approx(
        40 * t / (20 * t + 1.0)
    )
    assert theory(draft_total_s=0.5, draft_hidden_s=0.2) == pytest.approx(40 * t / (20 * t + 0.3))
    # A step of a pipeline of eight stages is an eighth of a way through the target.
    assert theory(latency=8, steps=100, prefill_passes=4) == pytest.approx(40 * t / (96 * t / 8))
    ar[0].totals.target_passes = 10  # four requests share each pass, of both
    assert theory(target_passes=5) == pytest.approx(2.0)
    ar[0].totals.latency, ar[0].totals.steps = 8, 80
    assert theory(latency=8, steps=40) == pytest.approx(2.0)


@pytest.mark.slow
def test_bootstrap_interval_covers_the_true_ratio() -> None:
    """Coverage over 200 data sets of 16 prompts; for a true 95 % the chance of < 85 % is < 1e-6.

    Small samples cover a little less than the nominal level, hence the bound of 0.85.
    """
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        ar, mine = [], []
        for i in range(16):
            hard, own = rng.lognormal(0, 0.5), rng.lognormal(0, 0.1)
            ar.append(make_result([[1], [2]], times=[0.0, hard], prompt_id=i))
            mine.append(make_result([[1], [2]], times=[0.0, hard * own / 2], prompt_id=i))
        interval = speed_ratio_interval(mine, ar)
        assert interval is not None
        truth = 2.0 / np.exp(0.005)
        covered += interval[0] <= truth <= interval[1]
    assert covered >= 170
    assert speed_ratio_interval(mine[:1], ar[:1]) is None


def test_totals_merge_into_sums_and_refuse_other_runs() -> None:
    parts = [
        RunTotals(steps=2, target_bytes=9, model_s={"target": 1.0}, bytes_sent=4),
        RunTotals(steps=3, target_bytes=9, model_s={"target": 2.0, "draft": 1.0}, bytes_sent=None),
    ]
    merged = RunTotals.merge(parts)
    assert (merged.steps, merged.target_bytes) == (5, 9)
    assert merged.model_s == {"target": 3.0, "draft": 1.0}
    assert merged.bytes_sent is None
    with pytest.raises(ValueError, match="level_per_step"):
        RunTotals.merge([RunTotals(), RunTotals(level_per_step=True)])
    with pytest.raises(ValueError):
        RunTotals.merge([])
