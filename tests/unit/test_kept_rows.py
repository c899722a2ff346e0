"""Distributions that stay on the last rank: the same bits, verdicts and few bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from specdec.device import RemoteProbs, on_host, rows_on_host
from specdec.distributed.kept_rows import KeeperOfRequest, KeptRows, Query
from specdec.distributed.messages import Kind, Message, OpenedRequest
from specdec.executors import ModelAnswerer
from specdec.sampling.keyed_draws import KeyedDraws
from specdec.sampling.transform import SamplingParams, SamplingTransform
from specdec.types import NO_NODE, Batch, Commit, CommitKind, TreeRows
from tests.unit.test_sampling import logits_of

PLAIN = SamplingParams(temperature=0.7)
GREEDY = SamplingParams()
T06 = SamplingParams(temperature=0.6, top_k=80, top_p=0.9)
HISTORY = SamplingParams(temperature=0.7, no_repeat_ngram=2)
PROMPT = np.arange(4)


class LastRank:
    """An answerer with its kept rows; messages are packed and counted, but not sent."""

    def __init__(self, params: list[SamplingParams]) -> None:
        self.answerer = ModelAnswerer(draws=KeyedDraws(seed=3), needs_probs=True)
        self.kept = KeptRows()
        self.num_bytes = 0
        self.num_rows = 0  # whole rows in replies to queries
        self.keepers = {}
        for request, sampling in enumerate(params):
            opened = OpenedRequest(id=request, max_cached=99, sampling=sampling, tokens=PROMPT)
            self.answerer.open(opened)
            self.kept.open(opened)
            transform = SamplingTransform(sampling)
            self.keepers[request] = KeeperOfRequest(request, transform, self.ask)

    def answers(self, batch: Batch, logits: torch.Tensor):
        """What rank 0 reads of the answers, and the answers themselves."""
        answers = self.answerer.answer(batch, logits)
        received = self._sent(Kind.ANSWERS, self.kept.keep(batch, answers, logits))
        connected = [
            replace(a, probs=replace(a.probs, keeper=self.keepers[a.request]))
            if isinstance(a.probs, RemoteProbs)
            else a
            for a in received
        ]
        return connected, answers

    def ask(self, query: Query) -> torch.Tensor:
        reply = self._sent(Kind.ROWS, self.kept.answer(self._sent(Kind.QUERY, query)))
        self.num_rows += 0 if query.tokens is not None else len(reply)
        return reply

    def _sent(self, kind: Kind, body: Any) -> Any:
        packed = Message(kind, 1, 2, body).pack()
        self.num_bytes += packed.nbytes
        return Message.unpack(packed).body


def tree(request: int, parents: list[int], first_id: int = 0) -> TreeRows:
    """Nodes with ids from ``first_id``, in an order that is not that of their ids."""
    num = len(parents)
    ids = first_id + np.arange(num)[::-1]
    above = np.array([NO_NODE if p == NO_NODE else ids[p] for p in parents])
    tokens = np.arange(num) * 3 + 1
    return TreeRows.within(
        request=request, prefix_len=3, node_ids=ids, tokens=tokens, parent_ids=above
    )


SHAPE = [NO_NODE, 0, 0, 1, 1, 3]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("params", [[PLAIN], [GREEDY], [PLAIN, T06], [HISTORY, PLAIN, T06]])
def test_rows_and_values_have_the_bits_of_the_answers(params, dtype):
    """For requests whose rows are kept, sent as supports, or sent whole (with histories)."""
    rank = LastRank(params)
    batch = Batch(step=0, trees=tuple(tree(r, SHAPE) for r in range(len(params))))
    logits = logits_of("plain", rows=batch.num_nodes, vocab=64).to(dtype)
    received, expected = rank.answers(batch, logits)
    for mine, own, rows, sampling in zip(received, expected, batch.trees, params, strict=True):
        assert isinstance(mine.probs, RemoteProbs) == (sampling in (PLAIN, GREEDY))
        np.testing.assert_array_equal(mine.tokens, own.tokens)
        np.testing.assert_array_equal(on_host(mine.probs), on_host(own.probs))
        if not isinstance(mine.probs, RemoteProbs):
            continue
        dense = on_host(own.probs)
        np.testing.assert_array_equal(rows_on_host(list(mine.probs)), dense)
        asked = rank.num_rows
        for row, (probs, node_id) in enumerate(zip(mine.probs, rows.node_ids, strict=True)):
            children = rows.tokens[rows.parent_ids == node_id].tolist()
            assert sorted(mine.probs.known.get(int(node_id), {})) == children
            for token in [*children, 0, 63]:
                assert probs.of(token) == dense[row, token]
        assert rank.num_rows == asked, "single values take no rows"


def test_a_rejection_over_a_large_vocabulary_is_small():
    """64 rows of 128,256 bfloat16 logits and one rejected node; 65.7 MB if all were sent."""
    rank = LastRank([PLAIN])
    batch = Batch(step=0, trees=(tree(0, [NO_NODE, *range(63)]),))
    logits = logits_of("plain", rows=64, vocab=128_256).bfloat16()
    (answers,), _ = rank.answers(batch, logits)
    assert rank.num_bytes < 64 * 64
    on_host(answers.probs[5])
    assert rank.num_bytes <= 64 * 64 + 128_256 * 2 + 1024
    assert rank.num_bytes <= 500_000


def commit_of(kept: list[int], *, finished: bool = False) -> Commit:
    return Commit(
        request=0,
        step=0,
        kind=CommitKind.HIT,
        retired_ids=np.zeros(1, np.int64),
        retired_tokens=np.zeros(1, np.int64),
        next_token=1,
        root_id=kept[0],
        prefix_len=4,
        kept_ids=np.array(kept),
        finished=finished,
    )


def test_pruned_rows_are_dropped_and_others_stay():
    rank = LastRank([PLAIN])
    batch = Batch(step=0, trees=(tree(0, SHAPE),))
    (answers,), (own,) = rank.answers(batch, logits_of("plain", rows=6, vocab=64))
    rank.kept.commit([commit_of([1, 4])])
    left = [probs for probs in answers.probs if int(probs.node_ids) in (1, 4)]
    rows = np.flatnonzero(np.isin(batch.trees[0].node_ids, [1, 4]))
    np.testing.assert_array_equal(rows_on_host(left), on_host(own.probs)[rows])
    with pytest.raises(KeyError):
        on_host(answers.probs[0])  # node 5
    rank.kept.close(0)
    with pytest.raises(KeyError):
        on_host(left[0])
