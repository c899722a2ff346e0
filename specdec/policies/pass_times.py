"""How many draft passes fit beside a pass of the target, by a latency profile."""

from __future__ import annotations

from specdec.clocks import LatencyProfile, Work


def draft_passes(profile: LatencyProfile | None, *, stages: int = 1, rows: int = 1) -> float | None:
    """t_target / t_draft; None without a profile that prices both.

    Args:
        profile: of the clock; None on a wall clock.
        stages: of the target's pipeline, each with the profile's price of one. Default: 1.
        rows: of a draft pass. Default: 1.
    """
    if profile is None:
        return None
    target_ms, draft_ms = profile.ms(Work.STAGE, 1), profile.ms(Work.DRAFT, rows)
    return stages * target_ms / draft_ms if target_ms and draft_ms else None
