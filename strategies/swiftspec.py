"""SwiftSpec (arXiv 2506.11309): most probable trees on two device groups, and the serial form.

Algorithm 1: while the target group verifies bs nodes, the draft group expands the w most probable
leaves of the tree d times. Then the tree is rerooted at the verified tokens, grown if it has fewer
than bs nodes, and its most probable connected subgraph of bs nodes goes to the target.
"""

from __future__ import annotations

from typing import Literal

from specdec.compose.workbench import Parts, Workbench
from specdec.executors.layout import StageLayout
from specdec.policies import BestFirst
from specdec.sources import DraftModelSource
from specdec.verifiers import MatchVerifier


def build(
    bench: Workbench,
    *,
    bs: int = 8,
    w: int = 8,
    d: int | Literal["until_ready"] = 3,
    target_degree: int = 6,
    draft_degree: int = 2,
) -> Parts:
    """Algorithm 1 on a target group and a draft group.

    Args:
        bench: models, clock and seed.
        bs: nodes verified per pass, root included.
        w: leaves per expansion.
        d: expansions per target pass; about target's time over draft's, or "until_ready".
        target_degree, draft_degree: devices of the groups (the paper's split for Qwen2).
    """
    layout = StageLayout(stages=1, degree=target_degree, draft_degree=draft_degree)
    return _parts(bench, BestFirst(bs=bs, w=w, d=d, asynchronous=True), layout)


def build_base(bench: Workbench, *, bs: int = 8, w: int = 8, d: int = 3, degree: int = 8) -> Parts:
    """The serial form: both models on all devices (the paper's configuration 3).

    Args:
        bench: models, clock and seed.
        bs, w, d: as ``build``; the expansions come before each target pass.
        degree: devices.
    """
    layout = StageLayout(stages=1, degree=degree, draft_degree=degree, shared=True)
    return _parts(bench, BestFirst(bs=bs, w=w, d=d), layout)


def _parts(bench: Workbench, policy: BestFirst, layout: StageLayout) -> Parts:
    return bench.parts(
        source=DraftModelSource(runner=bench.draft_runner()),
        policy=policy,
        verifier=MatchVerifier(),
        stages=layout,
    )
