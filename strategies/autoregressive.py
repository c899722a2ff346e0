"""Plain decoding: one token per target pass, or per N steps of a pipeline (plain PP).

The baseline of every table (preset ``ar``). On a pipeline as many groups of requests as stages are
in flight.

    parts = autoregressive.build(bench, stages=4)
"""

from __future__ import annotations

from specdec.compose.presets import build_preset, on_pipeline
from specdec.compose.workbench import Parts, Workbench


def build(bench: Workbench, *, stages: int | None = None) -> Parts:
    """Plain decoding.

    Args:
        bench: models, clock and seed.
        stages: stages of a pipeline; one device if omitted.
    """
    return build_preset("ar", bench, on_pipeline(stages))
