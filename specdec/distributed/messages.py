"""Control messages: packed int64 arrays, one per step and direction.

Layout of every message: number of int64 words, kind, session, tick, then the kind's body. Arrays
are preceded by their length, floats are sent as their bits, bytes are padded to whole words.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from specdec.sampling.transform import SamplingParams
from specdec.types import Batch, Commit, CommitKind, IntArray, PrefillChunk, TreeRows

HEADER_WORDS = 4
_KINDS = tuple(CommitKind)
_WORD = 8


class Kind(IntEnum):
    """Kinds of control messages.

    From rank 0:

    - ``SETUP``: opens a session (JSON).
    - ``BEGIN``: a step's batch, to the first stage.
    - ``END``: the step's commits, and its batch for the later stages.
    - ``REPORT``: requests the rank's counts.
    - ``RELEASE``: closes a session.
    - ``STOP``: ends the process.
    - ``DRAFT``: a forward pass of a shared draft.
    - ``QUERY``: asks the last rank for distributions that it keeps (``kept_rows``).
    - ``BEGIN_TIMED``, ``END_TIMED``: a timed run begins or ends, in all sessions.

    To rank 0:

    - ``ANSWERS``: answers of the last rank.
    - ``EXITS``: candidates of a rank with early exits.
    - ``HIDDEN``, ``EARLY``: hidden states that a part needs with the answers, or before them.
    - ``ROWS``: reply to ``QUERY``.
    """

    SETUP = 0
    BEGIN = 1
    END = 2
    REPORT = 3
    RELEASE = 4
    STOP = 5
    DRAFT = 6
    ANSWERS = 7
    EXITS = 8
    HIDDEN = 9
    EARLY = 10
    QUERY = 11
    ROWS = 12
    BEGIN_TIMED = 13
    END_TIMED = 14


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedRequest:
    """The part of a request that ranks receive.

    Attributes:
        max_len: maximum number of tokens in its caches.
        tokens: int64[T], the prompt, if the transform reads it; otherwise empty.
    """

    id: int
    max_len: int
    sampling: SamplingParams
    tokens: IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Input of a step; closes take effect before opens, and opens before the batch."""

    closes: tuple[int, ...] = ()
    opens: tuple[OpenedRequest, ...] = ()
    batch: Batch

    @property
    def is_empty(self) -> bool:
        return not (self.closes or self.opens or self.batch.num_tokens)


@dataclass(frozen=True, slots=True)
class Ending:
    """End of a step: its input, its commits, and the number of nodes examined for pruning."""

    entry: Entry
    commits: tuple[Commit, ...]
    num_pruned: int


def pack_message(kind: Kind, session: int, tick: int, *body: IntArray) -> IntArray:
    """Returns int64[num_words]: a whole message, from the parts of its body."""
    num_words = HEADER_WORDS + sum(len(part) for part in body)
    return np.concatenate([_ints(num_words, kind, session, tick), *body])


def pack_json(kind: Kind, session: int, content: Any) -> IntArray:
    return pack_message(kind, session, 0, *_bytes_parts(json.dumps(content).encode()))


def unpack_json(packed: IntArray) -> Any:
    return json.loads(Reader(packed).bytes())


def pack_entry(entry: Entry) -> IntArray:
    """Packs the body of a BEGIN message, which is also the last part of an END message's body."""
    batch = entry.batch
    counts = (len(entry.closes), len(entry.opens), len(batch.trees), len(batch.prefills))
    parts = [_ints(batch.step, *counts, *entry.closes)]
    for opened in entry.opens:
        parts += _opened_parts(opened)
    for rows in batch.trees:
        parts += pack_tree(rows)
    for chunk in batch.prefills:
        parts += (_ints(chunk.request, chunk.start, len(chunk.tokens)), chunk.tokens)
    return np.concatenate(parts)


def pack_tree(rows: TreeRows) -> list[IntArray]:
    """Packs the rows of one request as arrays to be concatenated."""
    numbers = _ints(rows.request, rows.prefix_len, len(rows.paths), len(rows.tokens))
    return [numbers, rows.tokens, rows.paths.ravel()]


def unpack_entry(packed: IntArray) -> Entry:
    return Reader(packed).entry()


def pack_ending(commits: Sequence[Commit], num_pruned: int) -> list[IntArray]:
    """Packs the first parts of the body of an END message; ``pack_entry`` is the last."""
    parts = [_ints(num_pruned, len(commits))]
    for commit in commits:
        parts += pack_commit(commit)
    return parts


def pack_commit(commit: Commit) -> list[IntArray]:
    numbers = _ints(
        commit.request,
        commit.step,
        _KINDS.index(commit.kind),
        commit.next_token,
        commit.root_id,
        commit.prefix_len,
        commit.finished,
        len(commit.retired_ids),
    )
    kept = _ints(len(commit.kept_ids))
    return [numbers, commit.retired_ids, commit.retired_tokens, kept, commit.kept_ids]


def unpack_ending(packed: IntArray) -> Ending:
    reader = Reader(packed)
    num_pruned, num_commits = reader.ints(2)
    commits = tuple(reader.commit() for _ in range(num_commits))
    return Ending(reader.entry(), commits, num_pruned)


def _ints(*values: int) -> IntArray:
    return np.array(values, np.int64)


def _bytes_parts(data: bytes) -> list[IntArray]:
    padded = data + b"\0" * (-len(data) % _WORD)
    return [_ints(len(data)), np.frombuffer(padded, np.int64)]


def _bits(value: float) -> int:
    return int(np.array(value, np.float64).view(np.int64))


def _opened_parts(opened: OpenedRequest) -> list[IntArray]:
    params = opened.sampling
    numbers = _ints(
        opened.id,
        opened.max_len,
        _bits(params.temperature),
        params.top_k,
        _bits(params.top_p),
        params.no_repeat_ngram,
        len(opened.tokens),
    )
    processors = pickle.dumps(params.processors) if params.processors else b""
    return [numbers, opened.tokens, *_bytes_parts(processors)]


class Reader:
    """Reads a message's body from front to back; arrays are views of the message."""

    def __init__(self, packed: IntArray) -> None:
        self._words = packed
        self._at = HEADER_WORDS

    @property
    def at_end(self) -> bool:
        return self._at >= len(self._words)

    def ints(self, count: int) -> list[int]:
        return self.raw(count).tolist()

    def raw(self, count: int) -> IntArray:
        start = self._at
        self._at = start + count
        return self._words[start : self._at]

    def array(self) -> IntArray:
        """Reads an array that is preceded by its length."""
        return self.raw(self.ints(1)[0])

    def bytes(self) -> bytes:
        """Reads bytes that are preceded by their number."""
        (size,) = self.ints(1)
        return self.raw(-(-size // _WORD)).tobytes()[:size]

    def commit(self) -> Commit:
        request, step, kind, next_token, root_id, prefix_len, finished = self.ints(7)
        retired = self.array()
        return Commit(
            request=request,
            step=step,
            kind=_KINDS[kind],
            retired_ids=retired,
            retired_tokens=self.raw(len(retired)),
            next_token=next_token,
            root_id=root_id,
            prefix_len=prefix_len,
            kept_ids=self.array(),
            finished=bool(finished),
        )

    def entry(self) -> Entry:
        step, num_closes, num_opens, num_trees, num_prefills = self.ints(5)
        closes = tuple(self.ints(num_closes))
        opens = tuple(self._opened() for _ in range(num_opens))
        trees = tuple(self.tree() for _ in range(num_trees))
        prefills = tuple(self._chunk() for _ in range(num_prefills))
        batch = Batch(step=step, trees=trees, prefills=prefills)
        return Entry(closes=closes, opens=opens, batch=batch)

    def _opened(self) -> OpenedRequest:
        request, max_len, temperature, top_k, top_p, no_repeat = self.ints(6)
        floats = np.array([temperature, top_p], np.int64).view(np.float64).tolist()
        tokens, blob = self.array(), self.bytes()
        return OpenedRequest(
            id=request,
            max_len=max_len,
            sampling=SamplingParams(
                temperature=floats[0],
                top_k=top_k,
                top_p=floats[1],
                no_repeat_ngram=no_repeat,
                # The message comes from rank 0 of the same job.
                processors=pickle.loads(blob) if blob else (),  # noqa: S301
            ),
            tokens=tokens,
        )

    def tree(self) -> TreeRows:
        request, prefix_len, num_levels, num_rows = self.ints(4)
        tokens, paths = self.raw(num_rows), self.raw(num_levels * num_rows)
        paths = paths.reshape(num_levels, num_rows)
        return TreeRows(request=request, prefix_len=prefix_len, tokens=tokens, paths=paths)

    def _chunk(self) -> PrefillChunk:
        request, start = self.ints(2)
        return PrefillChunk(request=request, start=start, tokens=self.array())
