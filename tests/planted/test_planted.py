"""``specdec verify`` finds every planted bug, by exit status and by the name of a check."""

from __future__ import annotations

import pytest

from tests.planted.bugs import BUGS, SOUND
from tests.planted.conftest import TABLE
from tests.planted.hunt import find, hunt, table


@pytest.mark.slow
def test_every_planted_bug_is_found(request: pytest.FixtureRequest) -> None:
    found = hunt([name for name in BUGS if name not in SOUND])
    request.config.stash[TABLE] = table(found)
    missed = {one.bug: one.said for one in found if not one.caught}
    assert not missed, f"not found: {missed}"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SOUND))
def test_the_sound_code_passes(name: str) -> None:
    """Without a bug the same commands end with status 0, or finding bugs would mean nothing."""
    one = find(name)
    assert one.status == 0, one.said
    assert not one.checks
