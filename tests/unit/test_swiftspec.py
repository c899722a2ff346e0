"""SwiftSpec's schedule, the times of its groups, and the search for the best split."""

from typing import Any

import pytest

from specdec.clocks.build import build_profile
from specdec.config.job import run_job_of
from specdec.runs.runners import PartsRunner
from specdec.state import StopRules
from tests.matrix.cells import PROMPTS, Cell, config, pair

pytestmark = pytest.mark.slow

TARGET_MS, DRAFT_MS = 10.0, 3.0
COSTS = {
    "stage": {"tokens": [1], "ms": [TARGET_MS]},
    "draft": {"tokens": [1], "ms": [DRAFT_MS]},
}


def simulated(policy: str, d: int | str, executor: str = "pipeline") -> PartsRunner:
    """A traced run of the prompts, one by one, on constant times."""
    values = config(Cell("draft_model", policy, "match", executor, "t06"), stages=1)
    clock = {"kind": "simulated", "profile": "test", "scale": 1.0, "costs": COSTS}
    values["policy"]["d"] = d
    runner = PartsRunner(
        cfg={**values, "clock": clock, "trace": True, "batch_size": 1},
        pair=pair(),
        stop=StopRules(max_new_tokens=12),
    )
    for prompt in PROMPTS:
        runner.run([prompt], lambda _: None)
    return runner


def overlap_ms(runner: PartsRunner) -> float:
    """Milliseconds in which draft (rank 0) and target (rank 1) work at the same time."""
    assert runner.trace is not None
    found = runner.trace.spans()
    draft = [s for s in found if (s.rank, s.kind) == (0, "draft")]
    target = [s for s in found if (s.rank, s.kind) == (1, "stage")]
    assert draft
    assert target
    both = 0.0
    for a in draft:
        for b in target:
            end = min(a.start_s + a.seconds, b.start_s + b.seconds)
            both += max(0.0, end - max(a.start_s, b.start_s))
    return both * 1e3


@pytest.mark.parametrize("d", [2, 3])
def test_a_round_lasts_as_long_as_its_longer_side_and_what_is_serial(d: int) -> None:
    """d drafts fit beside the target: steps x t_target + serial expansions x t_draft, exactly."""
    runner = simulated("swiftspec", d)
    counts = runner.parts.policy.expansions  # type: ignore[attr-defined]
    assert runner.trace is not None
    steps = runner.trace.timeline.step
    total = steps * TARGET_MS + counts["between"] * DRAFT_MS
    assert runner.parts.clock.now() * 1e3 == pytest.approx(total)
    assert (d - 1) * steps < counts["beside"] <= d * steps, "the last steps have no room to draft"
    assert overlap_ms(runner) == pytest.approx(counts["beside"] * DRAFT_MS)


def test_the_serial_form_never_overlaps() -> None:
    """The control of the test above."""
    runner = simulated("swiftspec_base", 3)
    assert overlap_ms(runner) == 0.0
    assert runner.parts.policy.expansions["beside"] == 0  # type: ignore[attr-defined]


def test_until_ready_drafts_as_long_as_the_target_works() -> None:
    """4 expansions of 3 ms begin within 10 ms."""
    runner = simulated("swiftspec", "until_ready")
    counts = runner.parts.policy.expansions  # type: ignore[attr-defined]
    assert runner.trace is not None
    assert counts["beside"] <= 4 * runner.trace.timeline.step
    assert counts["beside"] > 3 * (runner.trace.timeline.step - len(PROMPTS))


def job(*words: str) -> dict[str, Any]:
    """A job's configuration on the virtual clock."""
    return run_job_of(["strategy=swiftspec", "model=random", "clock=simulated", *words]).config


@pytest.mark.parametrize(
    ("words", "times", "d"),
    [
        (["clock.profile=swiftspec_table6", "policy.d=ratio"], (10.48, 3.25), 3),
        (["clock.profile=swiftspec_table6", "policy.d=ratio_plus_one"], (10.48, 3.25), 4),
        (
            ["clock.profile=swiftspec_table6", "executor=tensor_parallel_shared"],
            (10.34, 3.73),
            3,
        ),
        (["clock.profile=swiftspec_table1", "policy.d=ratio"], (11.54, 2.61), 4),
    ],
)
def test_degrees_choose_times_and_times_choose_d(
    words: list[str], times: tuple[float, float], d: int
) -> None:
    found = job(*words)
    profile = build_profile(found["clock"])
    assert profile.costs["stage"](8) == pytest.approx(times[0])
    assert profile.costs["draft"](8) == pytest.approx(times[1])
    assert found["policy"]["d"] == d
    assert ("6 devices, interpolated" in found["clock"]["note"]) == (times[0] == 11.54)
