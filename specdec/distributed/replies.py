"""What ranks tell rank 0 within a step: answers, what exit heads propose, and hidden states.

A reply is a message of words; distributions or hidden states, where there are any, follow in a
second one. It names no nodes: both sides know from their books which rows it is about.

Shape letters: W tree rows, R rows (prompts' too), X exits, K candidates, V vocabulary, E hidden
size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from specdec.device import Probs, on_host
from specdec.distributed.messages import HEADER_WORDS, Kind, message
from specdec.types import Answers, Batch, Candidates, Exits, FloatArray, IntArray, TreeRows

REPLIES = (Kind.ANSWERS, Kind.EXITS, Kind.HIDDEN)
"""Kinds of messages that are replies."""

Owed: TypeAlias = tuple[Kind, int]
"""A reply that is due in a step: its kind, and the rank that it comes from."""

_BODY = HEADER_WORDS + 3  # behind the type and shape of what follows in the second message
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Reply:
    """One rank's word on the rows of a step.

    Attributes:
        kind: one of ``REPLIES``.
        body: int64[n]; tokens of answers, or candidates as ``exits_reply`` packs them.
        rows: on the host, for the second message: distributions, float64[W, V] of each exit or of
            the answers, or hidden states [R, E] of each layer, one below the other; None where
            there are none.
    """

    kind: Kind
    body: IntArray
    rows: torch.Tensor | None = None

    def words(self, session: int, tick: int) -> IntArray:
        """The first message."""
        about = [0, 0, 0]
        if self.rows is not None:
            about = [_DTYPES.index(self.rows.dtype), *self.rows.shape]
        return message(self.kind, session, tick, np.array(about, np.int64), self.body)


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
        _, kind, session, tick, dtype, num_rows, width = words[:_BODY].tolist()
        rows = torch.empty(num_rows, width, dtype=_DTYPES[dtype]) if width else None
        if rows is not None:
            receive(rows)
        return Arrived(session, tick, Reply(Kind(kind), words[_BODY:], rows))


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
            probs=_rows(reply.rows, part),
        )
        for rows, part in _by_request(batch, is_open)
    )


def exits_reply(exits: Sequence[Exits]) -> Reply:
    """Candidates of all tree rows at the exits of a rank, one exit after the other.

    The body is K, then tokens [X * W, K], the bits of log-probabilities [X * W, K], and counts
    [X * W].
    """
    found = Candidates.joined([e.candidates for e in exits])
    width = np.array([found.tokens.shape[1]], np.int64)
    bits = np.ascontiguousarray(found.logprobs, np.float64).view(np.int64)
    body = np.concatenate([width, found.tokens.ravel(), bits.ravel(), found.counts])
    return Reply(Kind.EXITS, body, _joined([] if found.probs is None else [found.probs]))


def read_exits(
    reply: Reply, batch: Batch, is_open: Callable[[int], bool], layers: Sequence[int]
) -> tuple[Exits, ...]:
    """The candidates of ``batch``, by exit and request.

    Args:
        reply: of ``exits_reply``.
        batch, is_open: as for ``read_answers``.
        layers: of the target before each of the rank's exits.
    """
    num_rows, k = len(layers) * batch.num_nodes, int(reply.body[0])
    body = reply.body[1:]
    assert len(body) == num_rows * (2 * k + 1), "rank 0 and the exits' rank disagree"
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
                probs=_rows(reply.rows, part),
            ),
            layer=layer,
        )
        for number, layer in enumerate(layers)
        for rows, part in _by_request(batch, is_open, start=number * batch.num_nodes)
    )


def hidden_reply(layers: Sequence[torch.Tensor]) -> Reply:
    """Hidden states [R, E] after each of a rank's layers, of all rows that it has computed."""
    return Reply(Kind.HIDDEN, np.zeros(0, np.int64), torch.cat(list(layers)).cpu())


def read_hidden(reply: Reply, batch: Batch, layers: Sequence[int]) -> dict[int, torch.Tensor]:
    """Layer -> [R, E] of a ``hidden_reply``, of all rows of ``batch`` in packing order."""
    rows, num_rows = reply.rows, batch.num_tokens
    assert rows is not None, "the ranks' rows follow"
    assert len(rows) == len(layers) * num_rows, "rank 0 and a layer's rank disagree"
    return dict(zip(layers, rows.split(num_rows), strict=True))


def _joined(probs: Sequence[Probs]) -> torch.Tensor | None:
    return torch.from_numpy(np.concatenate([on_host(p) for p in probs])) if probs else None


def _rows(probs: torch.Tensor | None, part: slice) -> FloatArray | None:
    return None if probs is None else probs[part].numpy()


def _by_request(
    batch: Batch, is_open: Callable[[int], bool], start: int = 0
) -> Iterator[tuple[TreeRows, slice]]:
    """Tree rows of open requests, and where they stand among all, which begin at ``start``."""
    for rows in batch.trees:
        stop = start + len(rows.node_ids)
        if is_open(rows.request):
            yield rows, slice(start, stop)
        start = stop
