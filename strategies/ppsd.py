"""PPSD (arXiv 2509.19368): a pipeline that verifies while its first stage drafts by early exit.

Stages: 4.1, ceil(N / E) of them, the last one smaller where E does not divide N. With more and
smaller stages the exit token comes from a later stage (Alg. 1, lines 16-18 and 27-31).
Verification while drafting: 4.2. The verifier ``match`` is Alg. 1, line 4; ``rejection`` is Eq. 2.
Deviation: ``width`` above 1 (preset ``ppsd_tree``) feeds a level of the exit's candidates in place
of one token.

    parts = ppsd.build(bench, width=4, children=4)
"""

from __future__ import annotations

from specdec.compose.presets import build_preset
from specdec.compose.workbench import Parts, Workbench
from specdec.interfaces import Verifier


def build(
    bench: Workbench,
    *,
    stages: int | None = None,
    width: int | None = None,
    children: int | None = None,
    verifier: Verifier | None = None,
) -> Parts:
    """One draft token, or one level of them, per step.

    Args:
        bench: models with an exit layer, clock and seed.
        stages: of the pipeline; ceil(N / E) if omitted.
        width: nodes per level; 1 in the paper.
        children: candidates per node; 1 in the paper.
        verifier: the preset's ``match`` if omitted.
    """
    keys = {"policy.width": width, "policy.children": children, "executor.stages": stages}
    return build_preset("ppsd", bench, keys, verifier=verifier)
