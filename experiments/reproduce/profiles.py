"""Latency profiles that an experiment derives from its own figures."""

from __future__ import annotations

from pathlib import Path

from specdec.files import write_json


def write_profile(
    folder: Path, *, target_ms: float, stages: int, draft_ms: float, transfer_ms: float
) -> Path:
    """A profile of an even pipeline; returns its path.

    Args:
        folder: where it is written.
        target_ms: a whole target pass of up to 64 tokens; a further block costs an eighth more.
        stages: the pass is cut into so many.
        draft_ms: a draft pass.
        transfer_ms: between two devices.
    """

    def flat(ms: float) -> dict[str, list[float]]:
        return {"tokens": [1, 64], "ms": [ms, ms]}

    stage = target_ms / stages
    costs = {
        "stage": {
            "tokens": [1, 64],
            "ms": [stage, stage],
            "block_tokens": 64,
            "block_ms": stage / 8,
        },
        "draft": flat(draft_ms),
        "transfer": {"tokens": [1], "ms": [transfer_ms]},
    }
    name = f"even_{target_ms:g}_{stages}_{draft_ms:g}_{transfer_ms:g}"
    note = "a what-if of experiments/open; no testbed"
    # JSON is YAML.
    return write_json(folder / "profiles" / f"{name}.yaml", {"note": note, "costs": costs})
