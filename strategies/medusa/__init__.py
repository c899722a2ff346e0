"""Medusa (Cai et al. 2024, arXiv 2401.10774): heads on the target's last hidden state.

Head k predicts the token k positions after the next one (2.1.1); the tree is the Cartesian product
of each head's best candidates (2.1.2). Deviations: there is no search for a sparser tree (2.3.3),
and the preset's verifier is ``match`` instead of typical acceptance.
"""

from __future__ import annotations

from strategies.medusa.source import MedusaSource
from strategies.medusa.typical_acceptance import TypicalVerifier

__all__ = ["MedusaSource", "TypicalVerifier"]
