"""Distributions that the last rank keeps, and of which rank 0 fetches what a verifier reads.

A row of 128,256 probabilities takes a megabyte in float64, and verifiers read few: rejection
sampling needs the probabilities of the children's tokens, and a whole row only after it has
rejected a child. So the last rank keeps the logits of answered nodes until they are pruned, and
sends with the answers the probability of each node's token after its parent, if that was in the
same batch. Rank 0 asks for everything else with a ``QUERY``; whole rows are sent as logits.

Distributions that filters have cut are small and sent with the answers (``SupportProbs``), as are
those of transforms that read histories, which the last rank alone applies.

Shape letters: W tree rows, A queried nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import numpy as np
import torch

from specdec.device import Probs, RemoteProbs, RowKeeper, on_host
from specdec.executors.stage import AnsweredRequest, Answerer, tree_slices
from specdec.sampling.transform import SamplingTransform
from specdec.types import Answers, Batch, Commit, FloatArray, IntArray, NodeMap, TreeRows

_NOT_SENT = cast("RowKeeper", None)


class Query(NamedTuple):
    """Asks for whole rows of nodes (``tokens`` None), or for probabilities of ``tokens``."""

    request: int
    node_ids: IntArray
    tokens: IntArray | None = None


@dataclass(frozen=True, slots=True)
class KeeperOfRequest:
    """Rank 0's access to the rows of a request; ``ask`` sends a query and returns the reply."""

    request: int
    transform: SamplingTransform
    ask: Callable[[Query], torch.Tensor]

    def rows(self, node_ids: IntArray) -> FloatArray:
        logits = self.ask(Query(self.request, node_ids))
        return on_host(_probs(self.transform, logits))

    def values(self, node_id: int, tokens: IntArray) -> FloatArray:
        values: FloatArray = self.ask(Query(self.request, np.array([node_id]), tokens)).numpy()
        return values


class KeptRows(Answerer):
    """An answerer whose whole distributions stay here: answers have only the values of children in
    the same batch.
    """

    def __init__(self, inner: Answerer) -> None:
        self._inner = inner
        self._of: dict[int, SamplingTransform] = {}
        self._rows: NodeMap[torch.Tensor] = NodeMap()

    def open(self, request: AnsweredRequest) -> None:
        self._inner.open(request)
        if not request.sampling.needs_history:
            self._of[request.id] = SamplingTransform(request.sampling)
            self._rows.open(request.id)

    def answer(self, batch: Batch, logits: torch.Tensor | None) -> tuple[Answers, ...]:
        answers = self._inner.answer(batch, logits)
        if logits is None:
            return answers
        left = []
        for (tree, rows), answer in zip(tree_slices(batch.trees), answers, strict=True):
            probs = answer.probs
            if answer.request in self._of and isinstance(probs, np.ndarray):
                self._rows.update(answer.request, tree.node_ids, logits[rows])
                known = _after_parents(tree, probs)
                kept = RemoteProbs(_NOT_SENT, tree.node_ids, logits.shape[1], known)
                answer = replace(answer, probs=kept)
            left.append(answer)
        return tuple(left)

    def reply(self, query: Query) -> torch.Tensor:
        rows = torch.stack([self._rows[query.request][i] for i in query.node_ids.tolist()])
        if query.tokens is None:
            return rows
        probs = _probs(self._of[query.request], rows)
        return torch.from_numpy(_at(probs, np.zeros_like(query.tokens), query.tokens))

    def commit(self, commits: Sequence[Commit]) -> None:
        self._inner.commit(commits)
        self._rows.commit(commits)

    def close(self, request_id: int) -> None:
        self._inner.close(request_id)
        self._of.pop(request_id, None)
        self._rows.close(request_id)


def _after_parents(tree: TreeRows, probs: FloatArray) -> dict[int, dict[int, float]]:
    """Returns node id -> token of a child in the same batch -> its probability."""
    order = np.argsort(tree.node_ids)
    at = np.searchsorted(tree.node_ids[order], tree.parent_ids)
    parents = order[np.minimum(at, len(order) - 1)]
    here = np.flatnonzero(tree.node_ids[parents] == tree.parent_ids)
    tokens = tree.tokens[here]
    columns = tree.parent_ids[here], tokens, _at(probs, parents[here], tokens)
    known: dict[int, dict[int, float]] = {}
    for parent, token, value in zip(*(column.tolist() for column in columns), strict=True):
        known.setdefault(parent, {})[token] = value
    return known


def _at(probs: Probs, rows: IntArray, tokens: IntArray) -> FloatArray:
    """Returns float64[n]: the probability of ``tokens[n]`` in row ``rows[n]``."""
    return on_host(probs)[rows, tokens]


def _probs(transform: SamplingTransform, logits: torch.Tensor) -> Probs:
    if transform.params.greedy:
        return transform.proposal_probs(logits)
    return transform.distribution(logits)
