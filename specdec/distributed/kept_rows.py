"""Distributions that the last rank keeps, and of which rank 0 fetches what a verifier reads.

A row of 128,256 probabilities takes a megabyte in float64, and verifiers read few rows: rejection
sampling needs the probabilities of the children's tokens, and a whole row only after it has
rejected a child. So the last rank keeps the logits of answered nodes until they are pruned. With
the answers it sends the probability of each node's token after its parent, if that was answered in
the same batch. Rank 0 asks for everything else with a ``QUERY``; whole rows are sent as logits in
the model's type, from which rank 0 computes the same probabilities.

Distributions that filters have cut on the host are small and sent with the answers instead
(``SupportProbs``). Transforms that read histories are applied on the last rank only, so their rows
are sent with the answers too.

Shape letters: W tree rows, A queried nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from specdec.device import Probs, on_host
from specdec.distributed.messages import Kind, OpenedRequest, Reader, pack_message
from specdec.distributed.replies import KeptValues, Reply
from specdec.sampling.transform import SamplingParams, SamplingTransform
from specdec.types import Answers, Batch, Commit, FloatArray, IntArray, NodeMap, TreeRows

if TYPE_CHECKING:
    from specdec.clocks.meter import Meter
    from specdec.distributed.group import RankGroup

_NONE: IntArray = np.zeros(0, np.int64)


class Keepers:
    """Rank 0's access to the rows that the last rank of a session keeps."""

    def __init__(
        self, *, group: RankGroup, session: int, rank: int, meter: Meter, timeout_s: float
    ) -> None:
        self._group = group
        self._session = session
        self._rank = rank
        self._meter = meter
        self._timeout_s = timeout_s
        self._num_queries = 0
        self._of: dict[int, KeeperOfRequest] = {}

    def open(self, request_id: int, params: SamplingParams) -> None:
        self._of[request_id] = KeeperOfRequest(request_id, SamplingTransform(params), self._ask)

    def close(self, request_id: int) -> None:
        self._of.pop(request_id, None)

    def of(self, request_id: int) -> KeeperOfRequest:
        return self._of[request_id]

    def _ask(self, body: IntArray) -> Reply:
        """Sends a ``QUERY`` and waits for its reply."""
        self._num_queries += 1
        message = pack_message(Kind.QUERY, self._session, self._num_queries, body)
        self._group.send(message, [self._rank])
        key = Kind.ROWS, self._rank
        with self._meter.waiting():
            return self._group.reply(key, self._session, self._num_queries, self._timeout_s)


@dataclass(frozen=True, slots=True)
class KeeperOfRequest:
    """Access to the kept rows of one request; implements ``specdec.device.RowKeeper``."""

    request: int
    transform: SamplingTransform
    ask: Callable[[IntArray], Reply]

    def rows(self, node_ids: IntArray) -> FloatArray:
        """Fetches float64[A, V]: the distributions after answered nodes of the tree."""
        logits = self.ask(_query(self.request, node_ids, _NONE)).rows
        assert logits is not None, "a query without tokens returns whole rows"
        return on_host(_probs(self.transform, logits))

    def values(self, node_id: int, tokens: IntArray) -> FloatArray:
        """Fetches float64[len(tokens)]: probabilities of tokens after an answered node."""
        body = self.ask(_query(self.request, np.array([node_id]), tokens)).body
        return body.view(np.float64)


class KeptRows:
    """The last rank's logits of answered nodes, by request."""

    def __init__(self) -> None:
        self._transforms: dict[SamplingParams, SamplingTransform] = {}
        self._of: dict[int, SamplingTransform] = {}
        self._rows: NodeMap[torch.Tensor] = NodeMap()

    def open(self, opened: OpenedRequest) -> None:
        params = opened.sampling
        if params.needs_history:
            return
        self._of[opened.id] = self._transforms.setdefault(params, SamplingTransform(params))
        self._rows.open(opened.id)

    def keep(
        self, batch: Batch, answers: Sequence[Answers], logits: torch.Tensor
    ) -> tuple[tuple[Answers, ...], KeptValues | None]:
        """Stores the logits of those answers whose whole distributions would have to be sent.

        Args:
            logits: [W, V].

        Returns:
            The answers without the kept distributions, and the values to send in place of these
            (None if no distribution is kept).
        """
        left, start = list[Answers](), 0
        values = np.full(len(logits), np.nan)
        for tree, answer in zip(batch.trees, answers, strict=True):
            part = slice(start, start + len(tree.node_ids))
            start = part.stop
            if answer.request in self._of and answer.probs is not None and _is_whole(answer.probs):
                self._rows.update(answer.request, tree.node_ids, logits[part])
                values[part] = _after_parents(tree, answer.probs)
                answer = replace(answer, probs=None)
            left.append(answer)
        none = all(mine is given for mine, given in zip(left, answers, strict=True))
        return tuple(left), None if none else KeptValues(values, logits.shape[1])

    def answer(self, packed: IntArray) -> Reply:
        reader = Reader(packed)
        request = reader.ints(1)[0]
        node_ids, tokens = reader.array(), reader.array()
        rows = torch.stack([self._rows[request][i] for i in node_ids.tolist()])
        if not len(tokens):
            return Reply(Kind.ROWS, _NONE, rows.cpu())
        values = _at(_probs(self._of[request], rows), np.zeros_like(tokens), tokens)
        return Reply(Kind.ROWS, values.view(np.int64))

    def commit(self, commits: Sequence[Commit]) -> None:
        self._rows.commit(commits)

    def close(self, request_id: int) -> None:
        self._of.pop(request_id, None)
        self._rows.close(request_id)


def _is_whole(probs: Probs) -> bool:
    return isinstance(probs, np.ndarray)


def _after_parents(tree: TreeRows, probs: Probs) -> FloatArray:
    """Returns float64[W]: probability of each row's token after its parent, or NaN without it."""
    order = np.argsort(tree.node_ids)
    at = np.searchsorted(tree.node_ids[order], tree.parent_ids)
    parents = order[np.minimum(at, len(order) - 1)]
    known = np.flatnonzero(tree.node_ids[parents] == tree.parent_ids)
    values = np.full(len(order), np.nan)
    values[known] = _at(probs, parents[known], tree.tokens[known])
    return values


def _at(probs: Probs, rows: IntArray, tokens: IntArray) -> FloatArray:
    """Returns float64[n]: the probability of ``tokens[n]`` in row ``rows[n]``."""
    return on_host(probs)[rows, tokens]


def _probs(transform: SamplingTransform, logits: torch.Tensor) -> Probs:
    """Computes the distributions that ``ModelAnswerer`` would put into answers for these logits."""
    if transform.params.greedy:
        return transform.proposal_probs(logits)
    return transform.distribution(logits)


def _query(request: int, node_ids: IntArray, tokens: IntArray) -> IntArray:
    """Packs the body of a ``QUERY``: whole rows without tokens, otherwise one node's values."""
    return np.concatenate([[request, len(node_ids)], node_ids, [len(tokens)], tokens])
