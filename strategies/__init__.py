"""Token sources, tree policies and verifiers that only the presets of a single paper use.

A preset is a YAML file in ``conf/strategy`` that names such parts; ``specdec.build`` creates them.
"""

from typing import TYPE_CHECKING

from specdec.lazy import lazy_exports

if TYPE_CHECKING:
    from strategies.amusd import FreeRunning
    from strategies.dsi import Blocks
    from strategies.eesd import ThompsonChain
    from strategies.flowspec import FlowSpec
    from strategies.medusa import MedusaSource, TypicalVerifier
    from strategies.multi_exit import MultiExitSource
    from strategies.pearl import Pearl
    from strategies.pipeinfer import PipeInfer
    from strategies.pipespec import FreeChain
    from strategies.specpipe import RelaxedVerifier, StrictVerifier
    from strategies.specpipe_bf import PipelineBestFirst
    from strategies.specpipe_db import AdaptiveWidth
    from strategies.ssd import Ssd
    from strategies.staged import StagedSource

__getattr__, __dir__ = lazy_exports(__name__)
