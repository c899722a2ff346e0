"""Pairs of target and draft: models, tables of logits, or target tokens with their draft ranks."""

from typing import TYPE_CHECKING

from specdec.lazy import lazy_exports

if TYPE_CHECKING:
    from specdec.executors.models import ModelPair
    from specdec.pairs.huggingface import HuggingFacePair
    from specdec.pairs.options import ModelOptions, build_pair
    from specdec.pairs.pretrained import LoadedPair, PretrainedPair
    from specdec.pairs.random import RandomPair
    from specdec.pairs.table import TablePair

__getattr__, __dir__ = lazy_exports(__name__)
