import numpy as np

from specdec.interfaces import TokenSource
from specdec.parts.fields import Share, validated
from specdec.sources.hashing import hash_u64, hash_uniform
from specdec.sources.sampled import sampled_candidates
from specdec.state import DecodeState, RequestState
from specdec.types import Candidates, FloatArray, IntArray, Nodes

_SCORES, _SILENT = 0, 3  # streams of the hash


class RandomSource(TokenSource):
    """Proposes random candidates, to test losslessness with bad drafts.

    A node's candidates depend only on the seed, the request and the tokens up to the node, so every
    strategy gets the same ones.

    Args:
        sample: sample candidates from a random distribution and return it (for rejection
            verifiers); else take its most probable tokens.
        silence: fraction of nodes that get no candidates; no effect with ``sample``.
    """

    @validated
    def __init__(
        self,
        *,
        vocab_size: int,
        sample: bool = False,
        seed: int = 0,
        silence: Share = 0.0,
    ) -> None:
        self.gives_probs = sample
        self.vocab_size = self._num_tokens = vocab_size
        self._seed = seed
        self._silence = silence

    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        paths = [
            (state.requests[request_id], state.requests[request_id].path_tokens(slot))
            for request_id, ids in nodes.items
            for slot in state.requests[request_id].tree.slots(ids).tolist()
        ]
        probs = np.stack([self._probs(request.id, path) for request, path in paths])
        if self.gives_probs:
            return sampled_candidates(state, nodes, probs, k)
        k = min(k, self._num_tokens)
        tokens = np.argsort(-probs, axis=1, kind="stable")[:, :k]
        logprobs = np.log(np.take_along_axis(probs, tokens, axis=1))
        counts = np.full(len(paths), k)
        for row, (request, path) in enumerate(paths):
            counts[row] = self._steer(request, path, tokens[row])
        return Candidates(tokens=tokens, logprobs=logprobs, counts=counts)

    def _draw(self, stream: int, request_id: int, path: IntArray) -> float:
        return float(hash_uniform(self._seed, stream, request_id, _digest(path)))

    def _probs(self, request_id: int, path: IntArray) -> FloatArray:
        """Returns float64[V]: a random positive distribution in which few tokens are probable."""
        digest, vocabulary = _digest(path), np.arange(self._num_tokens)
        drawn = hash_uniform(self._seed, _SCORES, request_id, digest, vocabulary)
        weights = (1.0 - drawn) ** -1.0  # a heavy tail: few tokens have most of the probability
        return weights / weights.sum()

    def _steer(self, request: RequestState, path: IntArray, tokens: IntArray) -> int:
        """Returns how many of a node's ``tokens`` to propose: all, or 0 with chance ``silence``."""
        silent = self._silence and self._draw(_SILENT, request.id, path) < self._silence
        return 0 if silent else len(tokens)


class NullSource(TokenSource):
    """Proposes no candidates, for plain autoregressive decoding."""

    gives_probs = True  # vacuously: all of its candidates are sampled

    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        return Candidates.empty(len(nodes))


def _digest(path: IntArray) -> np.uint64:
    places = hash_u64(0, np.arange(len(path)), path)
    return np.bitwise_xor.reduce(places)
