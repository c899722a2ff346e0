"""Distributions on their support: conversion, messages between ranks, and verdicts."""

import numpy as np
import pytest
import torch

from specdec.device import SupportProbs, on_host
from specdec.distributed.messages import Kind, Message
from specdec.executors import ModelAnswerer
from specdec.sampling.keyed_draws import KeyedDraws
from specdec.sampling.transform import SamplingParams
from specdec.types import Batch, TreeRows
from tests.states import new_request
from tests.unit.test_sampling import logits_of

T06 = SamplingParams(temperature=0.6, top_k=80, top_p=0.9)
PLAIN = SamplingParams(temperature=0.6)


def answered(logits: torch.Tensor, params: list[SamplingParams]) -> tuple[Batch, tuple]:
    """A batch with one chain per parameters, and its answers with distributions."""
    answerer = ModelAnswerer(draws=KeyedDraws(seed=3), needs_probs=True)
    num = len(logits) // len(params)
    trees: list[TreeRows] = []
    for request, sampling in enumerate(params):
        answerer.open(new_request(request, sampling=sampling))
        ids = np.arange(num)
        rows = {"node_ids": ids, "tokens": np.zeros(num, np.int64), "parent_ids": ids - 1}
        trees.append(TreeRows.within(request=request, prefix_len=9, **rows))
    batch = Batch(step=0, trees=tuple(trees))
    return batch, answerer.answer(batch, logits)


def sent(answers: tuple) -> tuple[tuple, int]:
    """The answers as rank 0 reads them, and the bytes of the message."""
    packed = Message(Kind.ANSWERS, 1, 2, answers).pack()
    return Message.unpack(packed).body, packed.nbytes


@pytest.mark.parametrize("params", [[T06], [T06, T06], [PLAIN], [T06, PLAIN]], ids=len)
def test_messages_keep_distributions(params):
    """Bit for bit, whether all, none or some requests have filters."""
    _, answers = answered(logits_of("plain", rows=6), params)
    received, _ = sent(answers)
    for mine, expected in zip(received, answers, strict=True):
        np.testing.assert_array_equal(mine.tokens, expected.tokens)
        np.testing.assert_array_equal(on_host(mine.probs), on_host(expected.probs))


def test_a_message_about_64_rows_of_a_large_vocabulary_is_small():
    """At most 0.5 MB with top-k; the rows themselves are 65.7 MB."""
    _, answers = answered(logits_of("plain", rows=64, vocab=128_256).float(), [T06])
    received, num_bytes = sent(answers)
    assert num_bytes <= 500_000
    assert isinstance(received[0].probs, SupportProbs)
    assert received[0].probs.shape == (64, 128_256)


def test_rows_on_their_support_are_those_of_the_array():
    probs = SupportProbs(
        np.array([[1, 4, 0], [0, 2, 3]]), np.array([[0.25, 0.75, 0], [0.5, 0, 0.5]]), 5
    )
    dense = np.array([[0, 0.25, 0, 0, 0.75], [0.5, 0, 0, 0.5, 0]])
    np.testing.assert_array_equal(on_host(probs), dense)
    assert len(probs) == 2
    for row, expected in zip(probs, dense, strict=True):
        assert len(row) == 5
        np.testing.assert_array_equal(on_host(row), expected)
        ids, values = row.support
        np.testing.assert_array_equal(ids, np.flatnonzero(expected))
        np.testing.assert_array_equal(values, expected[ids])
    chosen = np.array([1, 0, 1])
    np.testing.assert_array_equal(on_host(probs[chosen]), dense[chosen])
    np.testing.assert_array_equal(on_host(probs[1:]), dense[1:])
