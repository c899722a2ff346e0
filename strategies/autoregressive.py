"""Plain decoding: one token per target pass, or per N steps of a pipeline (plain PP)."""

from __future__ import annotations

from specdec.compose.workbench import Parts, Workbench
from specdec.policies import RootOnly
from specdec.serving import Feeding, ServingRules
from specdec.sources import NullSource
from specdec.verifiers import MatchVerifier


def build(bench: Workbench, *, stages: int | None = None) -> Parts:
    """The baseline of every table.

    Args:
        bench: models, clock and seed.
        stages: of a pipeline; None for one device.
    """
    return bench.parts(
        source=NullSource(),
        policy=RootOnly(),
        verifier=MatchVerifier(),
        stages=stages,
        serving=ServingRules(feeding=Feeding.MICRO_BATCHES),
    )
