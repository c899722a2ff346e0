"""What ranks tell rank 0 within a step: the target's answers, and what an exit head proposes.

A reply is a message of words; whole distributions, where there are any, follow in a second one. It
names no nodes: both sides know from their books which rows it is about.

Shape letters: W tree rows, K candidates, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specdec.device_probs import Probs, on_host
from specdec.distributed.codec import HEADER_WORDS, Kind, message
from specdec.types import Answers, Batch, Candidates, Exits, FloatArray, IntArray, TreeRows

REPLIES = (Kind.ANSWERS, Kind.EXITS)
"""Kinds of messages that are replies."""

_BODY = HEADER_WORDS + 2  # behind the shape of the distributions


@dataclass(frozen=True, slots=True)
class Reply:
    """One rank's word on the rows of a step.

    Attributes:
        kind: one of ``REPLIES``.
        body: int64[n]; tokens of answers, or candidates as ``exits_reply`` packs them.
        probs: float64[W, V]; None where nobody needs distributions.
    """

    kind: Kind
    body: IntArray
    probs: torch.Tensor | None = None

    def words(self, session: int, tick: int) -> IntArray:
        """The message, without the distributions."""
        shape = (0, 0) if self.probs is None else self.probs.shape
        return message(self.kind, session, tick, np.array(shape, np.int64), self.body)


@dataclass(frozen=True, slots=True)
class Arrived:
    """A reply, and the step that it belongs to."""

    session: int
    tick: int
    reply: Reply

    @staticmethod
    def read(words: IntArray, receive: Callable[[torch.Tensor], None]) -> Arrived:
        """Reads ``Reply.words``.

        Args:
            words: the message.
            receive: fills a tensor with the second message, where there is one.
        """
        _, kind, session, tick, num_rows, vocab = words[:_BODY].tolist()
        probs = torch.empty(num_rows, vocab, dtype=torch.float64) if vocab else None
        if probs is not None:
            receive(probs)
        return Arrived(session, tick, Reply(Kind(kind), words[_BODY:], probs))


def answers_reply(answers: Sequence[Answers]) -> Reply:
    """The last rank's, of all tree rows that it has computed."""
    probs = [a.probs for a in answers if a.probs is not None]
    return Reply(Kind.ANSWERS, np.concatenate([a.tokens for a in answers]), _joined(probs))


def read_answers(reply: Reply, batch: Batch, is_open: Callable[[int], bool]) -> tuple[Answers, ...]:
    """The answers to ``batch``, by request.

    Args:
        reply: of ``answers_reply``.
        batch: the rows that were computed, as rank 0's books have them.
        is_open: whether a request has not ended; what concerns others is left out.
    """
    tokens = reply.body
    assert len(tokens) == batch.num_nodes, "rank 0 and the last rank disagree"
    return tuple(
        Answers(
            request=rows.request,
            node_ids=rows.node_ids,
            tokens=tokens[part],
            probs=_rows(reply.probs, part),
        )
        for rows, part in _by_request(batch, is_open)
    )


def exits_reply(exits: Sequence[Exits]) -> Reply:
    """Candidates of all tree rows that have passed the exit.

    The body is K, then tokens [W, K], the bits of log-probabilities [W, K], and counts [W].
    """
    found = Candidates.joined([e.candidates for e in exits])
    width = np.array([found.tokens.shape[1]], np.int64)
    bits = np.ascontiguousarray(found.logprobs, np.float64).view(np.int64)
    body = np.concatenate([width, found.tokens.ravel(), bits.ravel(), found.counts])
    return Reply(Kind.EXITS, body, _joined([] if found.probs is None else [found.probs]))


def read_exits(reply: Reply, batch: Batch, is_open: Callable[[int], bool]) -> tuple[Exits, ...]:
    """The candidates of ``batch``, by request; arguments as for ``read_answers``."""
    num_rows, k = batch.num_nodes, int(reply.body[0])
    body = reply.body[1:]
    assert len(body) == num_rows * (2 * k + 1), "rank 0 and the exit's rank disagree"
    tokens, bits = body[: 2 * num_rows * k].reshape(2, num_rows, k)
    logprobs, counts = bits.view(np.float64), body[2 * num_rows * k :]
    return tuple(
        Exits(
            request=rows.request,
            node_ids=rows.node_ids,
            candidates=Candidates(
                tokens=tokens[part],
                logprobs=logprobs[part],
                counts=counts[part],
                probs=_rows(reply.probs, part),
            ),
        )
        for rows, part in _by_request(batch, is_open)
    )


def _joined(probs: Sequence[Probs]) -> torch.Tensor | None:
    return torch.from_numpy(np.concatenate([on_host(p) for p in probs])) if probs else None


def _rows(probs: torch.Tensor | None, part: slice) -> FloatArray | None:
    return None if probs is None else probs[part].numpy()


def _by_request(batch: Batch, is_open: Callable[[int], bool]) -> Iterator[tuple[TreeRows, slice]]:
    """Tree rows of open requests, and where they stand among all."""
    start = 0
    for rows in batch.trees:
        stop = start + len(rows.node_ids)
        if is_open(rows.request):
            yield rows, slice(start, stop)
        start = stop
