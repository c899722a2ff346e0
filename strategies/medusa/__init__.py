"""Medusa (Cai et al. 2024, arXiv 2401.10774): heads on the target's last hidden state.

A baseline of PPSD's Table 2. Head k guesses the token k positions after the next one (2.1.1); the
tree is the Cartesian product of each head's best candidates (2.1.2). Deviations: no search for a
sparser tree (2.3.3); the preset's verifier is ``match``, the paper's typical acceptance.

    parts = medusa.build(bench, heads=2, branching=[4, 2])
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec.compose.presets import build_preset, on_pipeline
from specdec.compose.workbench import Parts, Workbench
from specdec.interfaces import Verifier
from strategies.medusa.source import MedusaSource
from strategies.medusa.typical_acceptance import TypicalVerifier

__all__ = ["MedusaSource", "TypicalVerifier", "build"]


def build(
    bench: Workbench,
    *,
    heads: int | None = None,
    branching: Sequence[int] | None = None,
    verifier: Verifier | None = None,
    stages: int | None = None,
) -> Parts:
    """A static tree of the heads' candidates.

    Args:
        bench: models, clock and seed.
        heads: number of heads; untrained ones if the pair has no trained ones.
        branching: children per node, level by level; at most as many levels as heads.
        verifier: the preset's ``match`` if omitted.
        stages: stages of a pipeline; one device if omitted.
    """
    shape = None if branching is None else list(branching)
    keys = {"source.heads": heads, "policy.branching": shape, **on_pipeline(stages)}
    return build_preset("medusa", bench, keys, verifier=verifier)
