"""Several exits of the target, one chosen for each token (PPSD, arXiv 2509.19368, B.3).

PPSD names this as future work without a rule; ours is in ``MultiExitSource``. With ``gamma`` the
drafts are verified afterwards (EESD), without it while drafting (PPSD).
"""

from __future__ import annotations

from strategies.multi_exit.source import MultiExitSource

__all__ = ["MultiExitSource"]
