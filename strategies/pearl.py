"""PEARL (arXiv 2408.11850): the draft and the target work at the same time, in rounds.

While the target makes one pass, the draft model drafts the next gamma tokens. *Pre-verify*: the
target verifies only the root; its answer decides about the first of the tokens drafted meanwhile.
If it is rejected, the target's token is emitted and the draft is dropped. If it is accepted, the
other tokens are submitted in the next round. *Post-verify*: the target verifies the tokens of the
last round and the first one of this round. If all are accepted the next round post-verifies too,
otherwise it pre-verifies.
"""

from typing import Literal

from specdec.clocks import LatencyProfile
from specdec.interfaces import Events, TokenSource, TreePolicy
from specdec.parts.fields import Count, DraftCount, validated
from specdec.policies.chain import grow_chains
from specdec.policies.tree_growth import draft_passes, live_requests, ready_requests, unsubmitted
from specdec.state import DecodeState
from specdec.tree import TokenTree
from specdec.types import Nodes

Length = Literal["auto", "ratio", "until_ready"]
AUTO, RATIO, UNTIL_READY = "auto", "ratio", "until_ready"

_UNPRICED = 6  # draft tokens of "auto" without a latency profile


class Pearl(TreePolicy):
    """Drafts ``gamma`` tokens during each target pass, and submits those of the round before.

    The tree determines the mode: after a miss it has only the root, which is submitted
    (pre-verify); after a hit also the rest of the last chain, which is submitted too (post-verify).
    The paper's published code verifies the same tokens in the same rounds (Alg. 2 and 3). On an
    executor of N steps per answer, each step runs its share of these draft passes.

    Args:
        gamma: draft tokens per round. "ratio" is target time / draft time in the latency profile,
            rounded (the paper's choice). "until_ready" drafts until the target's pass has ended, at
            least one token. "auto" is "ratio", or 6 without a profile.
        max_gamma: upper limit of ``gamma`` where it is not given as a number.
        latency: steps of the executor from submission to answer.
    """

    value_dependent = False

    @validated
    def __init__(
        self,
        *,
        gamma: DraftCount | Length,
        max_gamma: Count = 16,
        latency: int | None = 1,
        profile: LatencyProfile | None = None,
    ) -> None:
        steps = latency or 1
        if gamma in (AUTO, RATIO):
            ratio = draft_passes(profile, stages=steps)
            if ratio is None and gamma == RATIO:
                raise ValueError(
                    "gamma=ratio follows from a latency profile that prices stage and draft: use"
                    " clock=simulated or clock=paced with one, gamma=until_ready, or a number"
                )
            gamma = min(_UNPRICED if ratio is None else max(1, round(ratio)), max_gamma)
        self.gamma = self.chain_length = None if gamma == UNTIL_READY else int(gamma)
        self._limit = max_gamma if self.gamma is None else self.gamma
        self._per_step = -(-self._limit // steps)

    def max_cached_nodes(self, in_flight: int) -> int:
        return 1 + self._limit

    def select(self, state: DecodeState, source: TokenSource) -> Nodes:
        return unsubmitted(ready_requests(state, serial=True))

    def overlap(self, state: DecodeState, source: TokenSource, events: Events) -> bool:
        for num_passes in range(self._per_step):
            if self.gamma is None and num_passes and events.ready():
                break
            growing = [
                (request, len(request.tree))  # the tree is a chain: one token more
                for request in live_requests(state)
                if request.awaiting and _num_drafted(request.tree) < self._limit
            ]
            grow_chains(state, source, growing)
        return False


def _num_drafted(tree: TokenTree) -> int:
    return int((tree.submitted_at < 0).sum())
