"""Losslessness in distribution: the law of neighbouring tokens against the target's.

Target and draft are tables of logits given the last token, so the law is known. False-alarm rate of
a check: 1e-6, for a seed drawn anew. Each planted fault occurred in other projects.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from specdec.certify.laws import FALSE_ALARM, OPPOSED_TABLE, TARGET_TABLE
from specdec.compose.workbench import Workbench
from specdec.policies import Static
from specdec.sampling.keyed_draws import KeyedDraws, Purpose
from specdec.sources import DraftModelSource
from specdec.testing import TablePair
from specdec.types import FloatArray
from specdec.verifiers import RejectionVerifier, rejection
from tests.laws import least_p_value

pytestmark = pytest.mark.slow

OVERCONFIDENT = (2.0 * np.array(TARGET_TABLE)).tolist()
BLIND = (0.0 * np.array(TARGET_TABLE)).tolist()


def p_value(branching: list[int], draft: Any = OPPOSED_TABLE, stages: int | None = None) -> float:
    bench = Workbench(TablePair(target=TARGET_TABLE, draft=draft), seed=1)
    parts = bench.parts(
        source=DraftModelSource(runner=bench.draft_runner(), sample=True),
        policy=Static(branching=branching),
        verifier=RejectionVerifier(),
        stages=stages,
    )
    return least_p_value(parts, 1200, batch_size=300)


@pytest.mark.parametrize(
    ("branching", "draft", "stages"),
    [
        ([1, 1], OPPOSED_TABLE, None),
        ([3, 1, 2], OPPOSED_TABLE, None),
        ([3, 1], OVERCONFIDENT, None),
        ([4], BLIND, 2),
    ],
    ids=["chain", "tree", "overconfident draft", "blind draft, stages"],
)
def test_rejection_sampling_keeps_the_law(
    branching: list[int], draft: Any, stages: int | None
) -> None:
    assert p_value(branching, draft, stages) > FALSE_ALARM


def _shared(
    self: Any, prompt_id: Any, positions: Any, purpose: Purpose, index: Any = 0
) -> FloatArray:
    purpose = Purpose.DRAFT if purpose is Purpose.ACCEPT else purpose
    return _HONEST(self, prompt_id, positions, purpose, index)


_HONEST = KeyedDraws.uniform
FAULTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "correction from the target": (rejection, "_residual", lambda target, draft: target),
    "candidate and test share a draw": (KeyedDraws, "uniform", _shared),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are in tests/planted/mutants.yaml."""
    monkeypatch.setattr(*FAULTS[name])
    assert p_value([2, 2]) < FALSE_ALARM
