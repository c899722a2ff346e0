"""Nodes of token trees and the candidates proposed for them.

Shape letters: W nodes, K candidates per node, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from specdec.device import Probs, concatenate, on_host
from specdec.types.arrays import BoolArray, FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class Nodes:
    """Nodes of one or more requests.

    Per-node results are *packed*: they have one row per node, in the order of ``items``.

    Attributes:
        items: (request id, node ids int64[W_r]) per request; a request appears at most once.
    """

    items: tuple[tuple[int, IntArray], ...] = ()

    def __len__(self) -> int:
        return sum([len(ids) for _, ids in self.items])

    def packed(self) -> Iterator[tuple[int, IntArray, slice]]:
        """Yields (request id, node ids int64[W_r], slice of its packed rows) per request."""
        start = 0
        for request_id, ids in self.items:
            stop = start + len(ids)
            yield request_id, ids, slice(start, stop)
            start = stop

    def where(self, mask: BoolArray) -> Nodes:
        """Returns the nodes whose entry in ``mask``, bool[W], is true, without empty requests."""
        selected = [(request_id, ids[mask[rows]]) for request_id, ids, rows in self.packed()]
        return Nodes(tuple(item for item in selected if len(item[1])))


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Proposed children of W nodes, with one row per node in packed order (``Nodes``).

    Attributes:
        tokens: int64[W, K], most probable first, or in sampling order if they were sampled.
        logprobs: float64[W, K], log draft probability given the node (<= 0).
        counts: int64[W], number of valid entries per row; 0 if the source has no proposal (yet).
        probs: float64[W, V], the distribution from which the candidates were sampled; None unless
            the verifier needs it.
        origins: int64[W, K], index of the source that proposed each candidate (0 is the main
            source); None if all are 0.
    """

    tokens: IntArray
    logprobs: FloatArray
    counts: IntArray
    probs: Probs | None = None
    origins: IntArray | None = None

    @staticmethod
    def empty(num_nodes: int, num_candidates: int = 1) -> Candidates:
        shape = (num_nodes, num_candidates)
        return Candidates(
            tokens=np.zeros(shape, np.int64),
            logprobs=np.full(shape, -np.inf),
            counts=np.zeros(num_nodes, np.int64),
        )

    @staticmethod
    def joined(parts: Sequence[Candidates]) -> Candidates:
        """Concatenates rows of parts with the same K, no origins, and probs in all or none."""
        if len(parts) == 1:
            return parts[0]
        assert all(part.origins is None for part in parts), "origins would be lost"
        probs = [part.probs for part in parts if part.probs is not None]
        return Candidates(
            tokens=np.concatenate([part.tokens for part in parts]),
            logprobs=np.concatenate([part.logprobs for part in parts]),
            counts=np.concatenate([part.counts for part in parts]),
            probs=concatenate(probs) if probs else None,
        )

    def take(self, rows: IntArray) -> Candidates:
        """Returns the rows with the indices ``rows``, int64[W], which may repeat."""
        return Candidates(
            tokens=self.tokens[rows],
            logprobs=self.logprobs[rows],
            counts=self.counts[rows],
            probs=None if self.probs is None else self.probs[rows],
            origins=None if self.origins is None else self.origins[rows],
        )

    def spread(self, mask: BoolArray) -> Candidates:
        """Scatters the rows to the true entries of ``mask``, bool[W]; the other rows get count 0.

        If there are ``probs``, the other rows get the uniform distribution.
        """
        num_nodes = len(mask)
        full = Candidates.empty(num_nodes, self.tokens.shape[1])
        full.tokens[mask] = self.tokens
        full.logprobs[mask] = self.logprobs
        full.counts[mask] = self.counts
        probs = origins = None
        if self.probs is not None:
            probs = np.full((num_nodes, self.probs.shape[1]), 1.0 / self.probs.shape[1])
            probs[mask] = on_host(self.probs)
        if self.origins is not None:
            origins = np.zeros(full.tokens.shape, np.int64)
            origins[mask] = self.origins
        return replace(full, probs=probs, origins=origins)
