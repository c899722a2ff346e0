"""Replies of ranks to rank 0 within a step: answers, candidates of early exits, hidden states.

A reply is a control message; distributions or hidden states, if any, follow in a second message.
Replies contain no node ids: both sides know from ``InFlightRows`` which rows a reply covers.

Shape letters: W tree rows, R rows including prompt rows, X exits, K candidates, V vocabulary,
E hidden size, A queried nodes, N entries of all supports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from specdec.device import Probs, RemoteProbs, RowKeeper, SupportProbs, on_host
from specdec.distributed.messages import HEADER_WORDS, Kind, pack_message
from specdec.types import (
    Answers,
    Batch,
    Candidates,
    Exits,
    FloatArray,
    HiddenName,
    IntArray,
    TreeRows,
)

REPLIES = (Kind.ANSWERS, Kind.EXITS, Kind.HIDDEN, Kind.EARLY, Kind.ROWS)

ReplyKey: TypeAlias = tuple[Kind, int]
"""Kind of a reply, and the rank that sends it."""

_BODY = HEADER_WORDS + 3  # the body follows the dtype and shape of the second message
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Reply:
    """One rank's output for the rows of a step.

    Attributes:
        kind: one of ``REPLIES``.
        body: int64[n]; answers as packed by ``answers_reply``, or candidates by ``exits_reply``.
        rows: content of the second message, on the host, or None: distributions float64[W, V] of
            the answers or of each exit, supports float64[2, N] of the answers' distributions,
            hidden states [R, E] of each name, concatenated, or the logits [A, V] for a ``QUERY``.
    """

    kind: Kind
    body: IntArray
    rows: torch.Tensor | None = None

    def pack(self, session: int, tick: int) -> IntArray:
        second = [0, 0, 0]
        if self.rows is not None:
            second = [_DTYPES.index(self.rows.dtype), *self.rows.shape]
        return pack_message(self.kind, session, tick, np.array(second, np.int64), self.body)


@dataclass(frozen=True, slots=True)
class ReceivedReply:
    session: int
    tick: int
    reply: Reply

    @staticmethod
    def unpack(packed: IntArray, receive: Callable[[torch.Tensor], None]) -> ReceivedReply:
        """Inverts ``Reply.pack``; ``receive`` fills a tensor with the second message, if any."""
        _, kind, session, tick, dtype, num_rows, width = packed[:_BODY].tolist()
        rows = torch.empty(num_rows, width, dtype=_DTYPES[dtype]) if width else None
        if rows is not None:
            receive(rows)
        return ReceivedReply(session, tick, Reply(Kind(kind), packed[_BODY:], rows))


@dataclass(frozen=True, slots=True)
class KeptValues:
    """Values sent in place of distributions that stay on the last rank.

    Attributes:
        values: float64[W], the probability of each row's token after its parent; NaN if the parent
            is not among the rows, or if its distribution is sent.
        vocab_size: V.
    """

    values: FloatArray
    vocab_size: int


def answers_reply(answers: Sequence[Answers], kept: KeptValues | None = None) -> Reply:
    """Packs the last rank's answers for all tree rows that it has computed.

    The body is the tokens [W]. Distributions that filters have cut are sent as supports: the body
    continues with V and the number of entries of each row [W], and the second message is the token
    ids and the probabilities of all entries, float64[2, N].

    Args:
        answers: one per request, without the distributions that the rank keeps.
        kept: appended to the body; kept rows have no entries. None if no rows are kept.
    """
    tokens = np.concatenate([a.tokens for a in answers])
    given = [a.probs for a in answers if a.probs is not None]
    if not given and kept is None:
        return Reply(Kind.ANSWERS, tokens)
    if kept is None and not all(isinstance(probs, SupportProbs) for probs in given):
        return Reply(Kind.ANSWERS, tokens, _joined(given))
    parts = [(len(a.tokens), None if a.probs is None else _entries(a.probs)) for a in answers]
    counts = [np.zeros(num, np.int64) if part is None else part[0] for num, part in parts]
    entries = [part[1] for _, part in parts if part is not None]
    vocab_size = given[0].shape[-1] if kept is None else kept.vocab_size
    body = [tokens, np.array([vocab_size]), *counts]
    if kept is not None:
        body.append(kept.values.view(np.int64))
    rows = torch.from_numpy(np.concatenate(entries, axis=1)) if entries else None
    return Reply(Kind.ANSWERS, np.concatenate(body), rows)


def _entries(probs: Probs) -> tuple[IntArray, FloatArray]:
    """Returns the number of positive entries per row [W]; their ids and values float64[2, N]."""
    if isinstance(probs, SupportProbs):
        return np.count_nonzero(probs.values, axis=1), np.stack(probs.support)
    dense = on_host(probs)
    rows, ids = np.nonzero(dense)
    return np.bincount(rows, minlength=len(dense)), np.stack([ids, dense[rows, ids]])


def read_answers(
    reply: Reply,
    batch: Batch,
    is_open: Callable[[int], bool],
    keeper: Callable[[int], RowKeeper],
) -> tuple[Answers, ...]:
    """Unpacks the answers to ``batch``, by request.

    Args:
        batch: the rows that were computed, according to rank 0.
        is_open: whether a request is still open; answers of other requests are dropped.
        keeper: request id -> access to the rows that the last rank keeps.
    """
    num = batch.num_nodes
    tokens, rest = reply.body[:num], reply.body[num:]
    assert len(tokens) == num, "rank 0 and the last rank disagree"
    if not len(rest) and reply.rows is None:
        return tuple(
            Answers(request=rows.request, node_ids=rows.node_ids, tokens=tokens[part])
            for rows, part in _by_request(batch, is_open)
        )
    assert len(rest) in (0, num + 1, 2 * num + 1), "rank 0 and the last rank disagree"
    vocab_size = int(rest[0]) if len(rest) else 0
    counts, kept = rest[1 : num + 1], rest[num + 1 :].view(np.float64)
    probs: Probs | None = None if reply.rows is None else reply.rows.numpy()
    if len(counts) and reply.rows is not None:
        probs = _supports(reply.rows.numpy(), vocab_size=vocab_size, counts=counts)

    def probs_of(rows: TreeRows, part: slice) -> Probs | None:
        if len(kept) and not counts[part].any():
            known = _known(rows, kept[part])
            return RemoteProbs(keeper(rows.request), rows.node_ids, vocab_size, known)
        return None if probs is None else probs[part]

    return tuple(
        Answers(
            request=rows.request,
            node_ids=rows.node_ids,
            tokens=tokens[part],
            probs=probs_of(rows, part),
        )
        for rows, part in _by_request(batch, is_open)
    )


def _known(rows: TreeRows, values: FloatArray) -> dict[int, dict[int, float]]:
    """Converts ``KeptValues.values`` [W] to node id -> token -> probability."""
    known: dict[int, dict[int, float]] = {}
    here = np.flatnonzero(~np.isnan(values))
    columns = rows.parent_ids[here].tolist(), rows.tokens[here].tolist(), values[here].tolist()
    for parent, token, value in zip(*columns, strict=True):
        known.setdefault(parent, {})[token] = value
    return known


def _supports(entries: FloatArray, *, vocab_size: int, counts: IntArray) -> SupportProbs:
    """Inverts the second message of ``answers_reply``, float64[2, N]."""
    used = np.arange(counts.max()) < counts[:, None]
    ids, values = np.zeros(used.shape, np.int64), np.zeros(used.shape)
    ids[used], values[used] = entries
    return SupportProbs(ids, values, vocab_size)


def exits_reply(exits: Sequence[Exits]) -> Reply:
    """Packs the candidates of all tree rows at a rank's exits, one exit after the other.

    The body is K, then tokens [X * W, K], log-probabilities as bits [X * W, K], counts [X * W].
    """
    candidates = Candidates.joined([e.candidates for e in exits])
    width = np.array([candidates.tokens.shape[1]], np.int64)
    bits = np.ascontiguousarray(candidates.logprobs, np.float64).view(np.int64)
    body = np.concatenate([width, candidates.tokens.ravel(), bits.ravel(), candidates.counts])
    return Reply(Kind.EXITS, body, _joined([] if candidates.probs is None else [candidates.probs]))


def read_exits(
    reply: Reply, batch: Batch, is_open: Callable[[int], bool], layers: Sequence[int]
) -> tuple[Exits, ...]:
    """Unpacks the candidates of ``batch``, by exit and request.

    ``layers`` has the number of target layers before each of the rank's exits.
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


def hidden_reply(kind: Kind, states: Sequence[torch.Tensor]) -> Reply:
    """Packs hidden states [R, E] of all rows; ``kind`` is ``HIDDEN`` or ``EARLY``."""
    return Reply(kind, np.zeros(0, np.int64), torch.cat(list(states)).cpu())


def read_hidden(
    reply: Reply, batch: Batch, names: Sequence[HiddenName]
) -> dict[HiddenName, torch.Tensor]:
    """Unpacks name -> [R, E] from a ``hidden_reply``; rows in the packing order of ``batch``."""
    rows, num_rows = reply.rows, batch.num_tokens
    assert rows is not None, "a reply with hidden states has rows"
    assert len(rows) == len(names) * num_rows, "rank 0 and a layer's rank disagree"
    return dict(zip(names, rows.split(num_rows), strict=True))


def _joined(probs: Sequence[Probs]) -> torch.Tensor | None:
    return torch.from_numpy(np.concatenate([on_host(p) for p in probs])) if probs else None


def _rows(probs: torch.Tensor | None, part: slice) -> FloatArray | None:
    return None if probs is None else probs[part].numpy()


def _by_request(
    batch: Batch, is_open: Callable[[int], bool], start: int = 0
) -> Iterator[tuple[TreeRows, slice]]:
    """Yields tree rows of each open request and their slice, counting rows from ``start``."""
    for rows in batch.trees:
        stop = start + len(rows.node_ids)
        if is_open(rows.request):
            yield rows, slice(start, stop)
        start = stop
