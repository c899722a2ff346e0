"""``specdec verify`` detects every planted bug, by exit status and by a failed check."""

from __future__ import annotations

import pytest

from tests.planted.bugs import BUGS, SOUND
from tests.planted.conftest import TABLE
from tests.planted.hunt import hunt, table
from tests.planted.warm import Pool
from tests.sampled import sampled

# The suite certifies the other controls' strategies elsewhere (tests/unit/test_verify*.py).
ON_DEMAND = {"sound_pipeline", "sound_rejection"}

NUM_PARTS = 3  # of all bugs

pytestmark = pytest.mark.xdist_group("planted")  # whose pool is of one process


@pytest.mark.slow
@pytest.mark.parametrize("part", sampled(range(NUM_PARTS), every=NUM_PARTS))
def test_planted_bugs_are_found(part: int, request: pytest.FixtureRequest, pool: Pool) -> None:
    results = hunt([name for name in BUGS if name not in SOUND][part::NUM_PARTS], pool)
    request.config.stash[TABLE] = request.config.stash.get(TABLE, "") + table(results) + "\n"
    missed = {result.bug: result.found.output for result in results if not result.caught}
    assert not missed, f"not detected: {missed}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.exhaustive if name in ON_DEMAND else ())
        for name in sorted(SOUND)
    ],
)
def test_the_sound_code_passes(name: str, pool: Pool) -> None:
    """Without a bug the same commands return 0; otherwise detecting bugs proves nothing."""
    (result,) = hunt([name], pool)
    assert result.found.status == 0, result.found.output
    assert not result.found.checks
