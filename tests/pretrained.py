"""Models on disk, as tests open them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specdec.pairs import PretrainedPair
from specdec.pairs.pretrained import build_pretrained


def pretrained(target: Path, **given: Any) -> PretrainedPair:
    """A target alone, in float32 on the CPU; further arguments of the pair in ``given``."""
    return build_pretrained(target=str(target), **{"device": "cpu", **given})
