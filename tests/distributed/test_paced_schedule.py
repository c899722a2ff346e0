"""Paced ranks whose real work takes no time reproduce the simulator's times exactly.

On both clocks a step ends when its slowest transfer has ended. Regression: the controller used to
start the next step when the stages had computed, which made plain decoding (where the sending stage
is not the one that computes next) too fast by one transfer per stage.
"""

from typing import Any

import numpy as np
import pytest

from tests.distributed.fake_ranks import virtual_ranks
from tests.distributed.support import config, run

pytestmark = pytest.mark.slow

STAGES = 4
COSTS = {
    "stage": {"tokens": [1, 8], "ms": [20.0, 24.0]},
    "head": {"tokens": [1], "ms": [5.0]},
    "draft": {"tokens": [1], "ms": [8.0]},
    "prune": {"tokens": [1], "ms": [4.0]},
    "transfer": {"tokens": [1, 8], "ms": [3.0, 4.0]},
    "exit": {"tokens": [1], "ms": [2.0]},
}


def emitted(kind: str, strategy: str, costs: dict[str, Any], **keys: Any) -> dict[int, list[float]]:
    """Emission times of each request's tokens, on one clock."""
    values = config(strategy, STAGES, "t06", distributed=kind == "paced", **keys)
    values["clock"] = {"kind": kind, "profile": "test", "scale": 2.0, "costs": costs}
    found, _ = run(values)
    return {request: list(result.emitted_s) for request, result in found.items()}


@pytest.mark.parametrize(
    ("strategy", "draft_ms", "keys"),
    [
        ("ar", 8.0, {}),
        ("ar", 8.0, {"batch_size": 3}),
        ("specinfer", 8.0, {}),  # drafts between the trees
        ("specpipe", 8.0, {}),
        ("specpipe", 30.0, {}),  # the draft is slower than any stage
        ("specpipe_db", 30.0, {"batch_size": 3}),
        ("ppsd", 8.0, {}),
        ("ar", 8.0, {"executor__groups": [2, 1, 2, 1]}),
        ("pipedec", 8.0, {"executor__groups": [1, 3, 1, 2]}),
        ("ppsd_multi", 8.0, {"model__exit_layer": 1}),  # both exits in the first stage
        ("ppsd_multi", 8.0, {"model__exit_layer": 3}),  # in the second and the third
        ("medusa", 8.0, {}),  # heads beside the trees
    ],
)
def test_paced_times_are_the_simulators(
    strategy: str, draft_ms: float, keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = {**COSTS, "draft": {"tokens": [1], "ms": [draft_ms]}}
    expected, found = both_times(strategy, costs, monkeypatch, **keys)
    assert found == {request: pytest.approx(times) for request, times in expected.items()}


def both_times(
    strategy: str, costs: dict[str, Any], monkeypatch: pytest.MonkeyPatch, **keys: Any
) -> tuple[dict[int, list[float]], dict[int, list[float]]]:
    expected = emitted("simulated", strategy, costs, **keys)
    with virtual_ranks(sum(keys.get("executor__groups", [1] * STAGES)) + 1, monkeypatch):
        return expected, emitted("paced", strategy, costs, **keys)


@pytest.mark.parametrize("transfer_ms", [0.0, 3.0])
def test_paced_times_of_ranks_that_run_free_are_the_simulators(
    transfer_ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request ends at the same time; before, ranks report an answer at the end of the pass in
    which it arrives (PPSD, Algorithm 1, line 3), and the simulator when it arrives.

    The first stage is the slowest and pruning is free: a virtual rank does what it is sent at once,
    so it runs passes of which a rank with its own time would learn that they were pruned.
    """
    prices = {"stage": 20.0, "head": 5.0, "exit": 9.0, "transfer": transfer_ms}
    costs = {kind: {"tokens": [1], "ms": [ms]} for kind, ms in prices.items()}
    free = {"executor__lock_step": False, "model__exit_layer": 1}
    expected, found = both_times("ppsd", costs, monkeypatch, **free)
    for request, times in expected.items():
        late = np.subtract(found[request], times)
        assert late[-1] == pytest.approx(0.0, abs=1e-6)
        assert min(late) > -1e-6
        assert max(late) < 2.0 * (20.0 + transfer_ms + 9.0) / 1e3, "later than the pass that runs"
