"""Builds the presets of ``conf/strategy`` in Python."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from specdec.compose.build import build_parts
from specdec.compose.workbench import Parts, Workbench
from specdec.config.hydra import compose_config
from specdec.interfaces import Verifier


def build_preset(
    name: str,
    bench: Workbench,
    keys: Mapping[str, Any] | None = None,
    *,
    verifier: Verifier | None = None,
) -> Parts:
    """Builds the strategy that ``strategy=NAME`` runs on the command line.

        parts = build_preset("specpipe", Workbench(pair), {"policy.width": 32})

    Args:
        name: preset.
        bench: models, clock and seed.
        keys: configuration keys to values; None keeps the preset's value. A key without a dot
            chooses an option of a group, as in ``{"executor": "pipeline"}``.
        verifier: replaces the preset's.

    Raises:
        UserError: an unknown preset, key or option, a bad value, or parts that do not fit together.
    """
    changed = {key: value for key, value in (keys or {}).items() if value is not None}
    words = [f"{key}={_text(value)}" for key, value in changed.items()]
    config = compose_config([f"strategy={name}", *words]).values
    return build_parts(config, bench, verifier=verifier)


def _text(value: Any) -> str:
    """A value in Hydra's grammar."""
    return value if isinstance(value, str) else json.dumps(value)


def on_pipeline(stages: int | None) -> dict[str, str | int | None]:
    """Keys that put a preset of one device on a pipeline.

    Args:
        stages: of the pipeline; None keeps the preset on one device.
    """
    return {} if stages is None else {"executor": "pipeline", "executor.stages": stages}
