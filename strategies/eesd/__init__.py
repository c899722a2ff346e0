"""Early exit, draft then verify (EESD): the baseline of PPSD (arXiv 2509.19368, 3.1).

The target's first E layers and an exit head draft ``gamma`` tokens, then all of them pass the
other layers at once. With ``max_gamma`` the length is drawn by Thompson sampling ("EESD w. TS",
Table 2; Liu et al. 2024, arXiv 2406.03853), in our reading: PPSD states no details.

    parts = eesd.build(bench, gamma=10)
"""

from __future__ import annotations

from specdec.compose.presets import build_preset
from specdec.compose.workbench import Parts, Workbench
from specdec.interfaces import Verifier
from strategies.eesd.thompson import ThompsonChain

__all__ = ["ThompsonChain", "build"]


def build(
    bench: Workbench,
    *,
    gamma: int | None = None,
    max_gamma: int | None = None,
    stages: int | None = None,
    verifier: Verifier | None = None,
) -> Parts:
    """A chain from the early exit on one device.

    Args:
        bench: models with an exit layer, clock and seed.
        gamma: draft tokens per pass; 5 and 10 in the paper's Table 1.
        max_gamma: draws the length, at most this long; excludes ``gamma``.
        stages: number of stages that a latency profile charges; ceil(N / E) if omitted.
        verifier: the preset's ``match`` if omitted.
    """
    keys = {"policy.gamma": gamma, "policy.max_gamma": max_gamma, "executor.stages": stages}
    name = "eesd" if max_gamma is None else "eesd_ts"
    return build_preset(name, bench, keys, verifier=verifier)
