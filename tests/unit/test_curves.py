"""What figures over batch sizes rest on: times of steps by rows, percentiles over requests."""

import numpy as np
import pytest

from specdec.metrics import RunTotals, summarise
from strategies.specpipe_db import AdaptiveWidth
from tests.unit.test_metrics import make_result


def test_step_times_are_fitted_where_there_is_no_profile() -> None:
    policy, sizes = AdaptiveWidth(width=64, children=1), np.array([0, 30])
    assert len({*policy._step_times(sizes).tolist()}) == 1  # nothing is known: flat
    for nodes in (4, 20, 8, 40, 12):
        policy._fitted.add(nodes, 0.01 + 0.001 * nodes)
    assert policy._step_times(sizes) == pytest.approx([0.01, 0.04])


def test_percentiles_over_requests_are_of_their_own_means() -> None:
    """A request whose gaps are 1 and 3 s counts as one of 2 s; one without a second token not."""
    one = [make_result([[1], [2], [3]], times=[0.0, gap, 4.0]) for gap in [1.0] * 60 + [2.0] * 40]
    slow = make_result([[1], [2]], times=[0.0, 7.0])
    single = make_result([[1]], times=[9.0])
    found = summarise([*one, slow, single], RunTotals())
    assert found["tbt_ms_p99"] == 3000.0, "a hundred of two hundred and one gaps are 2 or 3 s"
    assert found["tbt_ms_request_p99"] == 2000.0
    slower = summarise([slow] * 3 + one, RunTotals())
    assert slower["tbt_ms_request_p99"] == 7000.0
