"""Several exits of the target, one chosen for each token (PPSD, arXiv 2509.19368, B.3).

B.3 names the idea as future work and states no rule; ours is in ``MultiExitSource``. With
``gamma`` drafts are verified afterwards (EESD), without it while drafting (PPSD).
"""

from __future__ import annotations

from strategies.multi_exit.source import MultiExitSource

__all__ = ["MultiExitSource"]
