from typing import TYPE_CHECKING

from specdec.lazy import lazy_exports

if TYPE_CHECKING:
    from specdec.sources.background import Background
    from specdec.sources.combined import ModelChain
    from specdec.sources.eagle import EagleSource
    from specdec.sources.early_exit import EarlyExitSource
    from specdec.sources.katz import KatzModel, NGramSource
    from specdec.sources.mixture import MixtureSource
    from specdec.sources.model_source import DraftModelSource
    from specdec.sources.random import NullSource, RandomSource
    from specdec.sources.suffix import PromptLookupSource, SuffixSource
    from specdec.sources.synthetic import SyntheticPair, SyntheticSource
    from specdec.sources.translated import TranslatedSource

__getattr__, __dir__ = lazy_exports(__name__)
