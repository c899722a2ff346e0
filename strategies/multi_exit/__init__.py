"""Several exits of the target, one chosen for each token (PPSD, arXiv 2509.19368, B.3).

B.3 names the idea as future work and states no rule; ours is in ``MultiExitSource``. With
``gamma`` drafts are verified afterwards (EESD), without it while drafting (PPSD).

    parts = multi_exit.build(bench, gamma=4)
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec.compose.presets import build_preset
from specdec.compose.workbench import Parts, Workbench
from specdec.interfaces import Verifier
from strategies.multi_exit.source import MultiExitSource

__all__ = ["MultiExitSource", "build"]


def build(
    bench: Workbench,
    *,
    gamma: int | None = None,
    further_exits: Sequence[int] | None = None,
    stages: int | None = None,
    verifier: Verifier | None = None,
) -> Parts:
    """A chain from exits of several depths.

    Args:
        bench: models with an exit layer, clock and seed.
        gamma: draft tokens per pass, verified afterwards on one device; None for a pipeline that
            takes one token per step.
        further_exits: number of layers before each exit after the pair's own; one exit at twice its
            depth if omitted.
        stages: of the pipeline, or charged by a latency profile; ceil(N / E) if omitted.
        verifier: the preset's ``match`` if omitted.
    """
    exits = None if further_exits is None else list(further_exits)
    keys = {"policy.gamma": gamma, "source.further_exits": exits, "executor.stages": stages}
    name = "ppsd_multi" if gamma is None else "eesd_multi"
    return build_preset(name, bench, keys, verifier=verifier)
