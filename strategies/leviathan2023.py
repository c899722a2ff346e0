"""Speculative decoding with a chain (Leviathan et al. 2023; Chen et al. 2023).

The draft proposes ``gamma`` tokens one after the other; one target pass verifies all of them. With
``RejectionVerifier`` this is Alg. 1 of either paper. Deviation: the preset (``speculative``) has
the verifier ``match``, whose output equals plain decoding with the same seed.

    parts = leviathan2023.build(bench, gamma=4, verifier=RejectionVerifier())
"""

from __future__ import annotations

from specdec.compose.presets import build_preset
from specdec.compose.workbench import Parts, Workbench
from specdec.interfaces import Verifier


def build(bench: Workbench, *, gamma: int | None = None, verifier: Verifier | None = None) -> Parts:
    """A chain of draft tokens per target pass.

    Args:
        bench: models, clock and seed.
        gamma: draft tokens per target pass.
        verifier: the preset's ``match`` if omitted.
    """
    return build_preset("speculative", bench, {"policy.gamma": gamma}, verifier=verifier)
