from __future__ import annotations

from specdec.clocks import LatencyProfile, Work


def draft_passes(profile: LatencyProfile | None, *, stages: int = 1, rows: int = 1) -> float | None:
    """Returns how many draft passes fit into one target pass, t_target / t_draft.

    The result is None without a latency profile that has both times. ``stages`` of the target each
    take the profile's time of one stage; a draft pass has ``rows`` rows.
    """
    if profile is None:
        return None
    target_ms, draft_ms = profile.ms(Work.STAGE, 1), profile.ms(Work.DRAFT, rows)
    return stages * target_ms / draft_ms if target_ms and draft_ms else None
