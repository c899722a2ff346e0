"""SpecPipe (arXiv 2504.04104 v2): a pipeline that receives one level of a dynamic tree per step.

Token source: a draft model on its own rank (3.3.1). Tree: fixed width (3.3.3). Steps: compute,
prune, transmit (3.3.2 and Algorithm 1, reconstructed). Deviations are in docs/specpipe.md.
``pipedec`` is the first version of the paper.
"""

from __future__ import annotations

from strategies.specpipe.verifiers import RelaxedVerifier, StrictVerifier

__all__ = ["RelaxedVerifier", "StrictVerifier"]
