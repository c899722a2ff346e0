"""All stages of a step at once cost what they cost one by one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from specdec.clocks import CONTROLLER, LatencyProfile, SimulatedClock, Work
from specdec.clocks.profile import CostCurve
from specdec.executors.step_charges import StepCharges

COSTS = {
    name: CostCurve(tokens=(1, 64), ms=(1.0 + i, 5.0 + i))
    for i, name in enumerate(("stage", "head", "prune", "transfer"))
}


class OneByOne:
    """A clock without the optional methods."""

    def __init__(self, clock: SimulatedClock) -> None:
        self._clock = clock
        self.align, self.charge, self.barrier = clock.align, clock.charge, clock.barrier


def times(clock: SimulatedClock | OneByOne, inner: SimulatedClock, devices: Sequence[int]) -> list:
    """Times of the controller and of all stages after each of some random steps."""
    rng, found = np.random.default_rng(2), []
    charges = StepCharges(clock, devices)  # type: ignore[arg-type]
    for _ in range(20):
        rows = rng.integers(0, 64, len(devices)).tolist()
        charges.compute(rows, int(rng.integers(0, 9)))
        charges.finish()
        inner.charge(CONTROLLER, Work.HEAD, int(rng.integers(0, 3)))
        charges.end(int(rng.integers(0, 2)) * 7, rows[:-1], answered=bool(rng.integers(0, 2)))
        found.append([inner.ends_s(rank) for rank in range(len(devices) + 1)])
    return found


@pytest.mark.parametrize("devices", [[1, 1, 1], [2, 1, 3]], ids=str)
def test_equal_times_with_and_without_the_optional_methods(devices: list[int]) -> None:
    at_once, one_by_one = (SimulatedClock(LatencyProfile(name="x", costs=COSTS)) for _ in range(2))
    expected = times(OneByOne(one_by_one), one_by_one, devices)
    assert times(at_once, at_once, devices) == expected
    assert len({row[0] for row in expected}) == len(expected)  # time passes in every step
