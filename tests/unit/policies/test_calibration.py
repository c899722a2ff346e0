"""RankCalibration against drafts with known errors."""

import numpy as np

from specdec.types import Commit, CommitKind, FloatArray
from strategies.specpipe_db import RankCalibration

SHARES = np.array([0.5, 0.2, 0.1, 0.05])
NUM_LEVELS = 4000


def settled(truth: FloatArray, *, ahead: int = 1) -> FloatArray:
    """Corrected SHARES after levels in which node i was on the path with probability truth[i]."""
    rng = np.random.default_rng(7)
    calibration = RankCalibration()
    num_levels = 0
    for root in range(1, NUM_LEVELS + 1):
        while num_levels < root - 1 + ahead:
            num_levels += 1
            calibration.add_level(
                0, position=num_levels, ids=4 * num_levels + np.arange(4), shares=SHARES
            )
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
        calibration.commit([commit])
        num_levels = num_levels if hit else root
    return calibration.corrected(SHARES)


def test_a_calibrated_draft_is_not_corrected() -> None:
    assert np.allclose(settled(SHARES), SHARES, rtol=0.12)


def test_a_draft_that_underrates_its_last_choices_is_corrected() -> None:
    """The bins are rank 1, ranks 2 and 3, rank 4; each has a different error factor."""
    truth = np.array([0.4, 0.3, 0.15, 0.1])
    assert np.allclose(settled(truth), truth, rtol=0.12)


def test_levels_behind_a_miss_count_for_nothing() -> None:
    """With three levels in flight, a miss discards two levels that give no evidence."""
    truth = np.array([0.3, 0.15, 0.075, 0.05])
    assert np.allclose(settled(truth, ahead=3), truth, rtol=0.12)
