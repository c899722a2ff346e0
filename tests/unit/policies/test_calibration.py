"""What a draft's promises were worth, against drafts whose faults are planted."""

from __future__ import annotations

import numpy as np

from specdec.policies.calibration import RankCalibration
from specdec.types import Commit, CommitKind, FloatArray

SHARES = np.array([0.5, 0.2, 0.1, 0.05])
NUM_LEVELS = 4000


def settled(truth: FloatArray, *, ahead: int = 1) -> FloatArray:
    """Corrected SHARES after levels in which node i was on the path with probability truth[i]."""
    rng = np.random.default_rng(7)
    found = RankCalibration()
    found.open(0)
    fed = 0
    for root in range(1, NUM_LEVELS + 1):
        while fed < root - 1 + ahead:
            fed += 1
            found.promise(0, position=fed, ids=4 * fed + np.arange(4), shares=SHARES)
        choice = int(rng.choice(5, p=[*truth, 1 - truth.sum()]))
        hit = choice < 4
        commit = Commit(
            request=0,
            step=root,
            kind=CommitKind.HIT if hit else CommitKind.MISS,
            retired_ids=np.array([-1]),
            retired_tokens=np.array([0]),
            next_token=0,
            root_id=4 * root + choice if hit else -1 - root,
            prefix_len=root,
            kept_ids=np.zeros(0, np.int64),
        )
        found.commit([commit])
        fed = fed if hit else root
    return found.corrected(SHARES)


def test_an_honest_draft_is_believed() -> None:
    assert np.allclose(settled(SHARES), SHARES, rtol=0.12)


def test_a_draft_that_promises_too_little_of_its_last_choices_is_corrected() -> None:
    """The bins are rank 1, ranks 2 and 3, rank 4; each is off by a factor of its own."""
    truth = np.array([0.4, 0.3, 0.15, 0.1])
    assert np.allclose(settled(truth), truth, rtol=0.12)


def test_levels_behind_a_miss_count_for_nothing() -> None:
    """With three levels in flight a miss takes two with it that nothing was learnt about."""
    truth = np.array([0.3, 0.15, 0.075, 0.05])
    assert np.allclose(settled(truth, ahead=3), truth, rtol=0.12)
