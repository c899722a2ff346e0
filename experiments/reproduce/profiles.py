"""Latency profiles of hypothetical clusters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specdec.files import write_json


def write_profile(
    folder: Path,
    *,
    target_ms: float,
    stages: int,
    draft_ms: float,
    transfer_ms: float,
    middle_ms: float = 0.0,
) -> Path:
    """Writes a profile of a pipeline with equal stages; returns its path.

    Args:
        folder: parent of the folder ``profiles``.
        target_ms: time of a target pass of up to 64 tokens; a further block costs an eighth more.
        middle_ms: time of a pass of a middle model. Default: 0, there is none.
    """

    def flat(ms: float) -> dict[str, Any]:
        return {"tokens": [1, 64], "ms": [ms, ms]}

    stage = target_ms / stages
    costs = {
        "stage": {**flat(stage), "block_tokens": 64, "block_ms": stage / 8},
        "draft": flat(draft_ms),
        "transfer": {"tokens": [1], "ms": [transfer_ms]},
    }
    name = f"even_{target_ms:g}_{stages}_{draft_ms:g}_{transfer_ms:g}"
    if middle_ms:
        costs["middle"] = flat(middle_ms)
        name += f"_{middle_ms:g}"
    note = "a what-if of experiments/open; no testbed"
    # JSON is YAML.
    return write_json(folder / "profiles" / f"{name}.yaml", {"note": note, "costs": costs})
