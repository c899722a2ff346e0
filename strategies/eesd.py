"""Early exit, draft then verify (EESD): the baseline of PPSD (arXiv 2509.19368, 3.1).

The target's first E layers and an exit head draft ``gamma`` tokens, then all of them pass the other
layers at once. With ``max_gamma`` the number of drafted tokens is drawn by Thompson sampling ("EESD
w. TS", Table 2; Liu et al. 2024, arXiv 2406.03853). PPSD states no details of its sampling.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specdec.interfaces import TokenSource, TreePolicy
from specdec.parts.fields import DraftCount, validated
from specdec.policies.chain import grow_chains
from specdec.policies.tree_growth import ready_requests, unsubmitted
from specdec.sources.hashing import hash_uniform
from specdec.state import DecodeState
from specdec.types import Commit, Nodes, Output

_STREAM = 0x75  # key that separates these draws from other uses of the hash


@validated
@dataclass(eq=False, kw_only=True)
class ThompsonChain(TreePolicy):
    """Submits draft chains whose length is Thompson-sampled from the acceptance rate so far.

    EESD's controller (Liu et al. 2024, arXiv 2406.03853) treats "draft another token or stop" as a
    two-armed bandit. The posterior of a request's acceptance rate is Beta(1 + accepted, 1 +
    rejected). Before each draft token a rate is sampled from the posterior, and a Bernoulli trial
    with that rate decides whether the chain continues. Neither draw depends on candidates, so
    rejection verifiers stay unbiased.

    Args:
        max_gamma: maximum number of draft tokens per target pass; the minimum is 1.
        seed: seed of the length's random numbers, independent of those that sample tokens.
    """

    value_dependent = False

    max_gamma: DraftCount = 10
    seed: int = 0

    def __post_init__(self) -> None:
        self._outcomes = defaultdict[int, list[int]](lambda: [0, 0])  # accepted, rejected
        self._submitted: dict[int, int] = {}  # request -> draft tokens awaiting their answer

    def max_cached_nodes(self, in_flight: int) -> int:
        return 1 + self.max_gamma

    def select(self, state: DecodeState, source: TokenSource) -> Nodes:
        requests = ready_requests(state, serial=True)
        lengths = [self._length(request.id, request.prefix_len) for request in requests]
        grow_chains(state, source, list(zip(requests, lengths, strict=True)))
        for request in requests:
            self._submitted[request.id] = len(request.tree) - 1
        return unsubmitted(requests)

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        """Counts accepted draft tokens, and the first rejected one if there is one."""
        for commit in commits:
            num_submitted = self._submitted.pop(commit.request, None)
            if num_submitted is None:
                continue
            accepted = len(commit.retired_ids) - 1
            outcomes = self._outcomes[commit.request]
            outcomes[0] += accepted
            outcomes[1] += accepted < num_submitted

    def close(self, request_id: int) -> None:
        self._outcomes.pop(request_id, None)
        self._submitted.pop(request_id, None)

    def _length(self, request_id: int, position: int) -> int:
        accepted, rejected = self._outcomes[request_id]
        indices = np.arange(1, self.max_gamma)
        bits = hash_uniform(self.seed, _STREAM, request_id, position)
        rng = np.random.default_rng(int(float(bits) * 2**53))
        rates = rng.beta(1 + accepted, 1 + rejected, len(indices))
        draws = hash_uniform(self.seed, _STREAM + 1, request_id, position, indices)
        stops = np.flatnonzero(draws >= rates)
        return 1 + (int(stops[0]) if len(stops) else len(indices))
