"""Early exit, draft then verify (EESD): the baseline of PPSD (arXiv 2509.19368, 3.1).

The target's first E layers and an exit head draft ``gamma`` tokens, then all of them pass the other
layers at once. With ``max_gamma`` the length is drawn by Thompson sampling ("EESD w. TS", Table 2;
Liu et al. 2024, arXiv 2406.03853). PPSD states no details, so this is our interpretation.
"""

from __future__ import annotations

from strategies.eesd.thompson import ThompsonChain

__all__ = ["ThompsonChain"]
