"""Most probable trees on one device, drafted before each target pass (SwiftSpec 3.1, serial).

SwiftSpec (arXiv 2506.11309, 3.1): expand the w most probable leaves d times, then verify the most
probable connected subgraph of bs nodes. Deviations: sizes for CPUs (the paper has bs 8 on GPUs),
and drafting ends early where little probability is left. ``swiftspec`` has the paper's own two
forms.

    parts = best_first.build(bench, bs=16, w=4, d=4)
"""

from __future__ import annotations

from specdec.compose.presets import build_preset
from specdec.compose.workbench import Parts, Workbench


def build(
    bench: Workbench,
    *,
    bs: int | None = None,
    w: int | None = None,
    d: int | None = None,
    min_mass: float | None = None,
    min_prob: float | None = None,
) -> Parts:
    """Best-first trees.

    Args:
        bench: models, clock and seed.
        bs: nodes verified per pass, root included.
        w: leaves per expansion.
        d: maximum expansions per pass.
        min_mass, min_prob: limits of early stopping (``BestFirst``); 0 in the paper.
    """
    sizes = {"policy.bs": bs, "policy.w": w, "policy.d": d}
    limits = {"policy.min_mass": min_mass, "policy.min_prob": min_prob}
    return build_preset("best_first", bench, {**sizes, **limits})
