"""Paced ranks whose real work takes no time reproduce the simulator's times exactly.

On both clocks a step ends when its slowest transfer has ended. Regression: the controller used to
start the next step when the stages had computed, which made plain decoding (where the sending stage
is not the one that computes next) too fast by one transfer per stage.
"""

from __future__ import annotations

from typing import Any

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
    expected = emitted("simulated", strategy, costs, **keys)
    with virtual_ranks(sum(keys.get("executor__groups", [1] * STAGES)) + 1, monkeypatch):
        found = emitted("paced", strategy, costs, **keys)
    assert found == {request: pytest.approx(times) for request, times in expected.items()}
