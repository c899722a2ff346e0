"""SpecInfer's next tree drafted while the one before is verified: same trees, other times."""

from typing import Any

import numpy as np
import pytest

from specdec.clocks import SimulatedClock
from specdec.compose.workbench import Workbench
from specdec.pairs import build_pair
from specdec.policies import Static
from specdec.sources import SyntheticSource
from specdec.verifiers import MatchVerifier
from tests import toys
from tests.states import new_request

from .bench import run

STAGES, STAGE_MS, DRAFT_MS = 4, 10.0, 1.0
BRANCHING = (1, 2, 1)
CERTAIN = {"weights": [1.0], "top1": [1.0], "decay": [1.0], "miss": [0.0]}


def simulated(
    overlap: str, guesses: int = 4, clock: SimulatedClock | None = None, **law: Any
) -> tuple[list[int], list[float]]:
    """(tokens, ms between emissions of different answers) of a synthetic pair on the clock."""
    pair = build_pair({"kind": "synthetic", **law})
    bench = Workbench(pair, clock=clock or toys.simulated(STAGE_MS, DRAFT_MS))
    parts = bench.parts(
        source=SyntheticSource(pair=pair),
        policy=Static(branching=BRANCHING, draft_overlap=overlap, guesses=guesses),
        verifier=MatchVerifier(),
        stages=STAGES,
    )
    request = new_request(3, np.arange(1, 9), 60)
    for _ in parts.decode(parts.new_state(), [request]):
        pass
    gaps = np.diff(np.unique(request.emitted_s)) * 1e3
    return request.output, gaps.tolist()


def test_serial_drafting_is_waited_for_and_hidden_drafting_is_not() -> None:
    serial, hidden = simulated("none"), simulated("full")
    assert serial[0] == hidden[0]
    # The last tree may be cut short by the request's last token.
    assert serial[1][:-1] == pytest.approx(
        [STAGES * STAGE_MS + len(BRANCHING) * DRAFT_MS] * (len(serial[1]) - 1)
    )
    assert hidden[1] == pytest.approx([STAGES * STAGE_MS] * len(hidden[1]))


def test_drafting_longer_than_verification_is_hidden_in_part() -> None:
    """The limit is a limit of time, not free drafting: the longer of the two counts."""
    clock = SimulatedClock(toys.profile(STAGE_MS, 20.0))
    gaps = simulated("full", clock=clock)[1][:-1]
    # Tree i + 1 enters when both its 60 ms of drafting, begun with tree i, and tree i are over.
    assert gaps == pytest.approx([60.0] * len(gaps))
    # The drafting time that is not hidden equals the time in which no stage was busy.
    waited = clock.drafted.total_s - clock.drafted.hidden_s
    at_once = (STAGES - 1) * STAGE_MS * 1e-3  # the prompt is one stage ahead of the first tree
    assert clock.now() == pytest.approx(sum(clock.busy_s.values()) - at_once + waited)


def test_a_right_guess_hides_the_drafting() -> None:
    """A draft that is always right: four steps make the leaves' pass and all three levels."""
    output, gaps = simulated("rule", guesses=1, **CERTAIN)
    assert output == simulated("none", **CERTAIN)[0]
    assert gaps == pytest.approx([STAGES * STAGE_MS] * len(gaps))


@pytest.mark.parametrize("latency", [2, 9])
def test_drafting_ahead_changes_no_tree(latency: int) -> None:
    """Every step verifies the same nodes as without it; only the source calls move."""
    trees, calls = [], []
    for overlap in ("none", "rule"):
        policy = Static(branching=(2, 1, 2), draft_overlap=overlap, guesses=3)
        done = run(policy, latency=latency, num_requests=2, batch_size=2)
        trees.append([sorted(s.chosen) for s in done.log])
        calls.append(sum(s.calls for s in done.log))
    assert trees[0] == trees[1]
    assert calls[1] < calls[0], "no guess was right: the test shows nothing"
