"""Tree policies: which tokens to propose, keep and verify.

Every policy is deterministic: equal scores are ordered by slot. A *serial* policy submits nodes of
a request only when all its submitted nodes are answered. Constructors raise ``ValueError`` for
arguments outside their annotated bounds.
"""

from specdec.policies.adaptive_width import AdaptiveWidth
from specdec.policies.best_first import BestFirst
from specdec.policies.chain import Chain
from specdec.policies.fixed_width import FixedWidth
from specdec.policies.pipeline_best_first import PipelineBestFirst
from specdec.policies.root_only import RootOnly
from specdec.policies.staged import StagedTree
from specdec.policies.static import Static
from specdec.policies.thompson import ThompsonChain

__all__ = [
    "AdaptiveWidth",
    "BestFirst",
    "Chain",
    "FixedWidth",
    "PipelineBestFirst",
    "RootOnly",
    "StagedTree",
    "Static",
    "ThompsonChain",
]
