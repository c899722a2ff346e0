"""Clocks: paced time on a clock that the tests turn by hand, reports, overruns, refusals."""

from dataclasses import asdict

import numpy as np
import pytest

import specdec.clocks.meter as metering
import specdec.clocks.wall as wall
from specdec.clocks import (
    CONTROLLER,
    ClockReport,
    CostCurve,
    LatencyProfile,
    MeasuredClock,
    PacedClock,
    SimulatedClock,
    Timeline,
    Work,
)
from specdec.interfaces import Executor
from specdec.metrics import Meter, RequestResult, RunTotals, summarise
from specdec.report.tables import notes_of
from specdec.runs.runners import PartsRunner, TokenPrompt, difference, rank_counts
from specdec.state import StopRules
from tests.matrix.cells import Cell, config, pair

PROFILE = LatencyProfile(
    name="test",
    costs={
        "stage": CostCurve(tokens=(1, 11), ms=(10.0, 20.0)),
        "head": CostCurve(tokens=(1,), ms=(5.0,)),
        "draft": CostCurve(tokens=(1,), ms=(4.0,)),
    },
)


class Hands:
    """Wall time that passes only when told to, or when somebody sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.slept: list[float] = []
        for module in (wall, metering):
            monkeypatch.setattr(module, "perf_counter", lambda: self.now)
        monkeypatch.setattr(wall, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.slept.append(seconds)
        self.now += seconds

    def work(self, ms: float) -> None:
        self.now += ms * 1e-3


@pytest.fixture
def hands(monkeypatch: pytest.MonkeyPatch) -> Hands:
    return Hands(monkeypatch)


def test_paced_work_takes_what_the_profile_says(hands: Hands) -> None:
    meter = Meter()
    clock = PacedClock(PROFILE, scale=2.0, meter=meter, rank=3, timeline=Timeline())
    clock.start(3)
    hands.work(7)
    clock.charge(3, Work.STAGE, 6)  # 15 ms, stretched to 30
    assert clock.now() == pytest.approx(0.030)
    assert hands.slept == pytest.approx([0.023])
    assert meter.wait_s == pytest.approx(0.023), "waiting is declared, so it is no overhead"
    clock.charge(3, Work.HEAD, 6)  # goes on where the stage ended
    assert clock.now() == pytest.approx(0.040)
    report = clock.report()
    assert (report.pieces, report.overruns) == (2, 0)
    assert report.busy_s == pytest.approx(0.040)
    assert report.wait_s == pytest.approx(0.033)
    assert [s.kind for s in report.spans] == ["stage", "head"]
    assert [s.start_s for s in report.spans] == pytest.approx([0.0, 0.030])
    assert [s.work_s for s in report.spans] == pytest.approx([0.007, 0.0])
    assert clock.report().spans == (), "spans are handed over once"


def test_late_work_is_an_overrun_and_is_never_waited_for(hands: Hands) -> None:
    clock = PacedClock(PROFILE)
    for real_ms in (12, 9, 30):
        clock.start(CONTROLLER)
        hands.work(real_ms)
        clock.charge(CONTROLLER, Work.STAGE, 1)
    report = clock.report()
    assert (report.pieces, report.overruns) == (3, 2)
    assert hands.slept == pytest.approx([0.001])
    assert report.busy_s == pytest.approx(0.052)


def test_what_one_piece_loses_the_next_may_make_up_for(hands: Hands) -> None:
    """The last stage's forward computes its head too: 12 ms of 10 + 5 are in time."""
    clock = PacedClock(PROFILE)
    clock.start(CONTROLLER)
    hands.work(12)
    clock.charge(CONTROLLER, Work.STAGE, 1)
    clock.charge(CONTROLLER, Work.HEAD, 1)
    assert clock.report().overruns == 0
    assert clock.now() == pytest.approx(0.015)
    clock.start(CONTROLLER)
    hands.work(16)
    clock.charge(CONTROLLER, Work.STAGE, 1)
    clock.charge(CONTROLLER, Work.HEAD, 1)
    report = clock.report()
    assert (report.pieces, report.overruns) == (2, 1)


def test_work_begins_with_its_model_call_and_overhead_before_it_is_not_hidden(
    hands: Hands,
) -> None:
    meter = Meter()
    clock = PacedClock(PROFILE, meter=meter)
    hands.work(50)  # trees, sampling, messages: nobody's piece of work
    hands.work(1)
    meter.add("draft", 1e-3)  # a call of 1 ms has just ended
    clock.charge(CONTROLLER, Work.DRAFT, 1)
    assert clock.now() == pytest.approx(0.054)
    hands.work(20)
    clock.start(CONTROLLER)
    hands.work(3)
    clock.charge(CONTROLLER, Work.DRAFT, 1)
    assert clock.now() == pytest.approx(0.078)


def test_a_paced_controller_ends_no_step_before_the_slowest_stage(hands: Hands) -> None:
    meter = Meter()
    clock = PacedClock(PROFILE, meter=meter)
    hands.work(100)
    for rank, rows in ((1, 6), (2, 1)):
        clock.align(rank, CONTROLLER)
        clock.charge(rank, Work.STAGE, rows)  # 15 and 10 ms
    hands.work(3)
    assert clock.busy(1)
    clock.barrier([1, 2])
    assert clock.now() == pytest.approx(0.115)
    assert meter.wait_s == pytest.approx(0.012), "waiting for stages is no overhead"
    assert not clock.busy(1)
    clock.charge(2, Work.HEAD, 1)
    clock.align(CONTROLLER, 2)  # nobody sleeps: what comes next counts from there
    assert clock.now() == pytest.approx(0.115)
    hands.work(1)
    meter.add("draft", 1e-3)
    clock.charge(CONTROLLER, Work.DRAFT, 1)
    assert clock.now() == pytest.approx(0.115 + 0.005 + 0.004)
    hands.work(20)  # a late controller stays late
    hands.work(1)
    meter.add("draft", 1e-3)
    clock.charge(CONTROLLER, Work.DRAFT, 1)
    assert clock.now() == pytest.approx(0.124 + 0.020 + 0.004)


def test_a_paced_stage_counts_from_when_its_rows_are_due(hands: Hands) -> None:
    """Rows 3 ms after their time: the stage has 7 of its 10 ms left, and is not late by it."""
    clock = PacedClock(PROFILE, rank=2)
    clock.start(2)
    clock.align(1, 2)
    clock.charge(2, Work.DRAFT, 1)  # any priced work: 4 ms
    clock.charge(1, Work.HEAD, 1)  # the rows are due at 5
    hands.work(4)
    clock.follow(2, 1)
    hands.work(1)
    clock.charge(2, Work.STAGE, 1)
    assert clock.now() == pytest.approx(0.015)
    assert clock.report().overruns == 0
    clock.start(2)
    clock.align(1, 2)
    hands.work(3)
    clock.charge(1, Work.TRANSFER, 1)  # not priced: it takes the time that it takes
    clock.follow(2, 1)
    clock.charge(2, Work.STAGE, 1)
    assert clock.now() == pytest.approx(0.028)


def test_a_measured_clock_writes_down_what_the_wall_says(hands: Hands) -> None:
    clock = MeasuredClock(timeline=Timeline())
    clock.start(CONTROLLER)
    hands.work(8)
    clock.charge(CONTROLLER, Work.STAGE, 3)
    clock.wait_until(0.020)
    assert hands.slept == pytest.approx([0.012])
    (span,) = clock.report().spans
    assert (span.tokens, span.seconds, span.work_s) == (
        3,
        pytest.approx(0.008),
        pytest.approx(0.008),
    )


def run(values: dict, prompts: list[TokenPrompt]) -> tuple[list[RequestResult], RunTotals]:
    runner = PartsRunner(cfg=values, pair=pair(), stop=StopRules(max_new_tokens=10))
    found: list[RequestResult] = []
    totals = runner.run(prompts, found.append)
    runner.close()
    return found, totals


def clock_section(kind: str) -> dict:
    costs = {"stage": {"tokens": [1], "ms": [2.0]}, "draft": {"tokens": [1], "ms": [1.0]}}
    return {"kind": kind, "profile": "test", "scale": 1.0, "costs": costs}


def test_paced_and_simulated_agree_on_one_device_but_for_real_overhead() -> None:
    """Same tokens, passes and pieces; a paced run is never faster than the profile allows.

    Slower it may be, by however much else the machine has to do, so that is not asserted.
    """
    values = config(Cell("draft_model", "chain", "match", "local", "t06"))
    prompts = [TokenPrompt(3, np.array([3, 1, 4])), TokenPrompt(9, np.array([2]))]
    outputs, totals = {}, {}
    for kind in ("simulated", "paced"):
        found, totals[kind] = run({**values, "clock": clock_section(kind)}, prompts)
        outputs[kind] = [(r.id, r.output, r.counters) for r in found]
    assert outputs["paced"] == outputs["simulated"]
    paced, simulated = totals["paced"], totals["simulated"]
    assert paced.steps == simulated.steps
    assert paced.target_passes == simulated.target_passes
    charged = 2e-3 * (simulated.target_passes + simulated.prefill_passes)
    charged += 1e-3 * simulated.draft_passes
    assert simulated.clock_s == pytest.approx(charged)
    assert paced.clock_s >= simulated.clock_s
    assert paced.paced_pieces == (
        simulated.target_passes + simulated.prefill_passes + simulated.draft_passes
    )
    assert simulated.paced_pieces is None
    assert 0 < paced.wait_s + sum(paced.model_s.values()) <= paced.wall_s


def test_a_run_with_too_many_overruns_says_that_it_does_not_count() -> None:
    found, totals = run(
        config(Cell("none", "root_only", "match", "local", "greedy")),
        [TokenPrompt(3, np.array([3, 1, 4]))],
    )
    totals.clock, totals.paced_pieces = "paced", 1000
    for overruns, counts in ((20, True), (21, False)):
        totals.overruns = overruns
        row = {"strategy": "x", **summarise(found, totals)}
        assert row["paced_counts"] is counts
        assert row["overrun_share"] == overruns / 1000
        assert any("DOES NOT COUNT" in note for note in notes_of([row])) is not counts
    totals.clock, totals.paced_pieces, totals.overruns = "measured", None, None
    assert summarise(found, totals)["paced_counts"] is None


class NoRanks(Executor):
    """An executor with the defaults of its base class."""

    submit = collect = None  # type: ignore[assignment]


def _since(before: dict, clock: PacedClock | SimulatedClock, executor: Executor) -> RunTotals:
    """Counts of the ranks since ``before``."""
    counts, _ = rank_counts(clock, executor)
    return RunTotals(**{name: difference(count, before[name]) for name, count in counts.items()})


def test_pace_is_summed_over_ranks_and_differences_are_taken() -> None:
    class Ranks(NoRanks):
        pieces = 10

        def reports(self) -> list[dict]:
            report = ClockReport(rank=1, origin_s=0.0, pieces=self.pieces, overruns=2, busy_s=1.5)
            return [{"clock": asdict(report), "rows": 7, "bytes_sent": 100}]

    clock, executor = PacedClock(PROFILE), Ranks()
    before, _ = rank_counts(clock, executor)
    executor.pieces = 14
    clock.start(CONTROLLER)
    clock.charge(CONTROLLER, Work.DRAFT, 1)
    totals = _since(before, clock, executor)
    assert totals.paced_pieces == 5
    assert totals.overruns == 0
    assert totals.stage_busy_s == {1: 0.0}
    assert totals.bytes_sent == 0
    simulated = SimulatedClock(PROFILE)
    simulated.charge(2, Work.STAGE, 1)
    assert rank_counts(simulated, executor)[0]["stage_busy_s"] == {2: 0.01}


@pytest.mark.parametrize("kind", ["simulated", "paced"])
def test_draft_work_beside_the_target_is_hidden(hands: Hands, kind: str) -> None:
    """Three drafts of 4 ms in and behind 10 ms of a stage; the fourth has the controller alone."""
    clock = SimulatedClock(PROFILE) if kind == "simulated" else PacedClock(PROFILE)
    before, _ = rank_counts(clock, NoRanks())
    clock.align(1, CONTROLLER)
    clock.charge(1, Work.STAGE, 1)
    clock.start(CONTROLLER)
    clock.drafting = True
    for _ in range(3):
        clock.charge(CONTROLLER, Work.DRAFT, 1)
    clock.barrier([1])
    clock.start(CONTROLLER)
    clock.charge(CONTROLLER, Work.DRAFT, 1)
    clock.drafting = False
    clock.charge(CONTROLLER, Work.HEAD, 1)
    totals = _since(before, clock, NoRanks())
    assert totals.draft_total_s == pytest.approx(0.016)
    assert totals.draft_hidden_s == pytest.approx(0.010)


@pytest.mark.parametrize("kind", ["simulated", "paced", "measured"])
def test_drafting_with_the_targets_own_layers_is_drafting_on_every_clock(kind: str) -> None:
    """It was none where draft work was told by its kind or its model's name: a free draft."""
    values = config(Cell("early_exit", "eesd", "match", "early_exit", "t06"))
    clock = {"kind": "measured"} if kind == "measured" else clock_section(kind)
    _, totals = run({**values, "clock": clock}, [TokenPrompt(3, np.array([3, 1, 4]))])
    assert totals.draft_passes > 4
    if kind == "measured":
        heads = sum(s for name, s in totals.model_s.items() if name != "target")
        assert heads < totals.draft_total_s < totals.total_model_s
    else:  # the exit's layers lie on one stage of 2 ms; paced work may take longer, never less
        charged = 2e-3 * totals.draft_passes
        assert totals.draft_total_s >= charged - 1e-9
        assert kind == "paced" or totals.draft_total_s == pytest.approx(charged)
        assert totals.draft_hidden_s == 0.0
