"""Models on disk, as tests open them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specdec.pairs import PretrainedPair


def pretrained(target: Path, **overrides: Any) -> PretrainedPair:
    """A pair without a draft, float32 on the CPU; ``overrides`` are arguments of the pair."""
    defaults = {
        "draft": None,
        "ngram": None,
        "dtype": "float32",
        "device": "cpu",
        "attention": "auto",
    }
    return PretrainedPair(target=str(target), **{**defaults, **overrides})
