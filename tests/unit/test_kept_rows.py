"""Distributions that stay on the last rank: few bytes, and no row longer than it is needed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from specdec.device import on_host, rows_on_host
from specdec.distributed.kept_rows import KeeperOfRequest, KeptRows, Query
from specdec.distributed.messages import Kind, Message
from specdec.executors import ModelAnswerer
from specdec.executors.stage import OpenedRequest
from specdec.sampling.keyed_draws import KeyedDraws
from specdec.sampling.transform import SamplingParams, SamplingTransform
from specdec.types import NO_NODE, Batch, Commit, CommitKind, TreeRows
from tests.unit.test_sampling import logits_of

PLAIN = SamplingParams(temperature=0.7)


class LastRank:
    """An answerer that keeps rows of request 0; messages are packed and counted, not sent."""

    def __init__(self) -> None:
        self.plain, inner = (
            ModelAnswerer(draws=KeyedDraws(seed=3), needs_probs=True) for _ in range(2)
        )
        self.kept = KeptRows(inner)
        self.num_bytes = 0
        opened = OpenedRequest(id=0, max_cached=99, sampling=PLAIN, tokens=np.arange(4))
        self.plain.open(opened)
        self.kept.open(opened)

    def answers(self, tree: TreeRows, logits: torch.Tensor):
        """The distributions as rank 0 reads them, and as they are."""
        batch = Batch(step=0, trees=(tree,))
        answers = self.plain.answer(batch, logits)
        (received,) = self._sent(Kind.ANSWERS, self.kept.answer(batch, logits))
        keeper = KeeperOfRequest(0, SamplingTransform(PLAIN), self.ask)
        return replace(received.probs, keeper=keeper), on_host(answers[0].probs)

    def ask(self, query: Query) -> torch.Tensor:
        return self._sent(Kind.ROWS, self.kept.reply(self._sent(Kind.QUERY, query)))

    def _sent(self, kind: Kind, body: Any) -> Any:
        packed = Message(kind, 1, 2, body).pack()
        self.num_bytes += packed.nbytes
        return Message.unpack(packed).body


def tree(parents: list[int]) -> TreeRows:
    """Nodes in an order that is not that of their ids."""
    ids = np.arange(len(parents))[::-1]
    above = np.array([NO_NODE if p == NO_NODE else ids[p] for p in parents])
    tokens = np.arange(len(parents)) * 3 + 1
    return TreeRows.within(request=0, prefix_len=3, node_ids=ids, tokens=tokens, parent_ids=above)


def test_a_rejection_over_a_large_vocabulary_is_small():
    """64 rows of 128,256 bfloat16 logits and one rejected node; 65.7 MB if all were sent."""
    rank = LastRank()
    logits = logits_of("plain", rows=64, vocab=128_256).bfloat16()
    probs, own = rank.answers(tree([NO_NODE, *range(63)]), logits)
    assert rank.num_bytes < 64 * 64
    np.testing.assert_array_equal(on_host(probs[5]), own[5])
    assert rank.num_bytes <= 64 * 64 + 128_256 * 2 + 1024
    assert rank.num_bytes <= 500_000


def test_pruned_rows_are_dropped_and_others_stay():
    rank, rows = LastRank(), tree([NO_NODE, 0, 0, 1, 1, 3])
    probs, own = rank.answers(rows, logits_of("plain", rows=6, vocab=64))
    commit = Commit(
        request=0,
        step=0,
        kind=CommitKind.HIT,
        retired_ids=np.zeros(1, np.int64),
        retired_tokens=np.zeros(1, np.int64),
        next_token=1,
        root_id=1,
        prefix_len=4,
        kept_ids=np.array([1, 4]),
    )
    rank.kept.commit([commit])
    left = [one for one in probs if int(one.node_ids) in (1, 4)]
    kept = np.flatnonzero(np.isin(rows.node_ids, [1, 4]))
    np.testing.assert_array_equal(rows_on_host(left), own[kept])
    with pytest.raises(KeyError):
        on_host(probs[0])  # node 5
    rank.kept.close(0)
    with pytest.raises(KeyError):
        on_host(left[0])
