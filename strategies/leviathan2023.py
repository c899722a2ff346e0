"""Speculative decoding with a chain (Leviathan et al. 2023; Chen et al. 2023).

The draft proposes ``gamma`` tokens one after the other; one target pass judges them all. With the
rejection verifier this is Alg. 1 of either paper; with ``match`` the output equals plain decoding
with the same seed.
"""

from __future__ import annotations

from specdec.compose.workbench import Parts, Workbench
from specdec.interfaces import Verifier
from specdec.policies import Chain
from specdec.sources import DraftModelSource
from specdec.verifiers import MatchVerifier


def build(bench: Workbench, *, gamma: int = 3, verifier: Verifier | None = None) -> Parts:
    """Chain drafting on one device.

    Args:
        bench: models, clock and seed.
        gamma: draft tokens per target pass.
        verifier: ``match`` where omitted.
    """
    verifier = verifier or MatchVerifier()
    source = DraftModelSource(runner=bench.draft_runner(), sample=verifier.needs.draft_probs)
    return bench.parts(source=source, policy=Chain(gamma=gamma), verifier=verifier)
