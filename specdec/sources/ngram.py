from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from specdec.interfaces import TokenSource
from specdec.metrics.counters import SourceCounters
from specdec.sources.katz import KatzModel
from specdec.sources.sampled import sampled_candidates
from specdec.types import Candidates, Nodes

if TYPE_CHECKING:
    from specdec.executors.models import ModelPair
    from specdec.state import DecodeState


class NGramSource(TokenSource):
    """Proposes continuations of each node's last ``order - 1`` tokens by a Katz n-gram model.

    This is the draft2 of Staged Speculative Decoding, section 3.2. Without ``katz``, trigrams of
    the pair's token samples are counted. ``sample`` returns sampled candidates and their
    distribution, for verifiers that need ``draft_probs``.
    """

    def __init__(
        self,
        *,
        katz: KatzModel | None = None,
        pair: ModelPair | None = None,
        sample: bool = False,
    ) -> None:
        if katz is None:
            assert pair is not None, "either katz or pair is required"
            katz = pair.artefact(KatzModel)
        self.katz = katz
        self.gives_probs = sample
        self.vocab_size: int | None = katz.vocab_size
        self.counters = SourceCounters()

    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        requests = [(state.requests[request_id], ids) for request_id, ids in nodes.items]
        contexts = [r.path_tokens(slot) for r, ids in requests for slot in r.tree.slots(ids)]
        if self.gives_probs:
            return sampled_candidates(state, nodes, self.katz.probs(contexts), k)
        tokens, logprobs = self.katz.top(contexts, min(k, self.katz.vocab_size))
        counts = (logprobs > -np.inf).sum(axis=1)  # fewer after a context with all V tokens seen
        return Candidates(tokens=tokens, logprobs=logprobs, counts=counts)
