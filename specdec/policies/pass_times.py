from __future__ import annotations

from specdec.clocks import LatencyProfile, Work


def draft_passes(profile: LatencyProfile | None, *, stages: int = 1, rows: int = 1) -> float | None:
    """Returns t_target / t_draft for a draft pass of ``rows`` rows; None if a time is unknown."""
    if profile is None:
        return None
    target_ms, draft_ms = profile.ms(Work.STAGE, 1), profile.ms(Work.DRAFT, rows)
    return stages * target_ms / draft_ms if target_ms and draft_ms else None
