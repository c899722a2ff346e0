"""Models on disk, as tests open them."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from specdec.pairs import PretrainedPair
from specdec.pairs.pretrained import build_pretrained


def pretrained(target: Path, **given: Any) -> PretrainedPair:
    """A target alone, in float32 on the CPU; further arguments of the pair in ``given``."""
    return build_pretrained(target=str(target), **{"device": "cpu", **given})


def models_made(pair: PretrainedPair) -> list[str]:
    """The names of the whole models that the pair loads from now on."""
    made, make = list[str](), pair.new_model

    def noting(name: str) -> PreTrainedModel:
        made.append(name)
        return make(name)

    pair.new_model = noting  # type: ignore[method-assign]
    return made
