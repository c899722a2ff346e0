"""Tree policies decide which tokens to propose, keep and verify.

Every policy is deterministic: equal scores are ordered by slot (tree index). A *serial* policy
submits nodes of a request only when the target has answered all that it submitted before.
"""

from typing import TYPE_CHECKING

from specdec.lazy import lazy_exports

if TYPE_CHECKING:
    from specdec.policies.adaptive import Adaptive, Arm
    from specdec.policies.beam import BestOfBeam
    from specdec.policies.best_first import BestFirst
    from specdec.policies.chain import Chain, RootOnly
    from specdec.policies.cost_sized import CostSized
    from specdec.policies.static import Static
    from specdec.policies.tree_growth import FixedWidth

__getattr__, __dir__ = lazy_exports(__name__)
