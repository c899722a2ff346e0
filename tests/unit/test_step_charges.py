"""All stages of a step at once cost what they cost one by one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from specdec.clocks import CONTROLLER, Clock, LatencyProfile, SimulatedClock, Work
from specdec.clocks.profile import CostCurve
from specdec.executors.pipeline import StepCharges

COSTS = {
    name: CostCurve(tokens=(1, 64), ms=(1.0 + i, 5.0 + i))
    for i, name in enumerate(("stage", "head", "prune", "transfer"))
}


class OneByOne(SimulatedClock):
    """A clock with the base class's loops over ranks."""

    fan_out, charge_each, fan_in = Clock.fan_out, Clock.charge_each, Clock.fan_in


def times(clock: SimulatedClock, devices: Sequence[int]) -> list:
    """Times of the controller and of all stages after each of some random steps."""
    rng, found = np.random.default_rng(2), []
    charges = StepCharges(clock, devices)
    for _ in range(20):
        rows = rng.integers(0, 64, len(devices)).tolist()
        charges.compute(rows, int(rng.integers(0, 9)))
        charges.finish()
        clock.charge(CONTROLLER, Work.HEAD, int(rng.integers(0, 3)))
        charges.end(int(rng.integers(0, 2)) * 7, rows[:-1], answered=bool(rng.integers(0, 2)))
        found.append([clock.ends_s(rank) for rank in range(len(devices) + 1)])
    return found


@pytest.mark.parametrize("devices", [[1, 1, 1], [2, 1, 3]], ids=str)
def test_equal_times_at_once_and_one_by_one(devices: list[int]) -> None:
    profile = LatencyProfile(name="x", costs=COSTS)
    expected = times(OneByOne(profile), devices)
    assert times(SimulatedClock(profile), devices) == expected
    assert len({row[0] for row in expected}) == len(expected)  # time passes in every step
