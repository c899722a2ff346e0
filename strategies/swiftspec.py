"""SwiftSpec (arXiv 2506.11309): most probable trees on two device groups, and the serial form.

Algorithm 1: while the target group verifies bs nodes, the draft group expands the w most probable
leaves of the tree d times. Then the tree is rerooted at the verified tokens, grown if it has fewer
than bs nodes, and its most probable connected subgraph of bs nodes goes to the target.

    parts = swiftspec.build(bench, d=2, target_degree=4)
    parts = swiftspec.build_base(bench, degree=4)
"""

from __future__ import annotations

from typing import Literal

from specdec.compose.presets import build_preset
from specdec.compose.workbench import Parts, Workbench


def build(
    bench: Workbench,
    *,
    bs: int | None = None,
    w: int | None = None,
    d: int | Literal["ratio", "ratio_plus_one", "until_ready"] | None = None,
    target_degree: int | None = None,
    draft_degree: int | None = None,
) -> Parts:
    """Algorithm 1 on a target group and a draft group.

    Args:
        bench: models, clock and seed.
        bs: nodes verified per pass, root included.
        w: leaves per expansion.
        d: expansions per target pass; see ``BestFirst``.
        target_degree, draft_degree: devices of the groups (preset: the paper's split for Qwen2).
    """
    tree = {"policy.bs": bs, "policy.w": w, "policy.d": d}
    groups = {"executor.target_degree": target_degree, "executor.draft_degree": draft_degree}
    return build_preset("swiftspec", bench, {**tree, **groups})


def build_base(
    bench: Workbench,
    *,
    bs: int | None = None,
    w: int | None = None,
    d: int | None = None,
    degree: int | None = None,
) -> Parts:
    """The serial form: both models on all devices (5.3, configuration 3).

    Args:
        bench: models, clock and seed.
        bs, w, d: as for ``build``; the expansions come before each target pass.
        degree: number of devices.
    """
    tree = {"policy.bs": bs, "policy.w": w, "policy.d": d}
    groups = {"executor.target_degree": degree, "executor.draft_degree": degree}
    return build_preset("swiftspec_base", bench, {**tree, **groups})
