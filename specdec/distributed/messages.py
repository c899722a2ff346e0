"""Messages between rank 0 and other ranks, and keys of the store in which ranks report their state.

A message is pickled: all ranks belong to one job, and their objects come from the same code.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from specdec.sampling.transform import SamplingParams
from specdec.types import Batch, Commit, IntArray

_WORD = 8


class Kind(IntEnum):
    """Kinds of messages, with their bodies.

    From rank 0:

    - ``SETUP``: opens a session (its plan).
    - ``BEGIN``: a step's batch, to the first stage (``Entry``).
    - ``END``: the step's commits, and its batch for the later stages (``Ending``).
    - ``REPORT``: requests the rank's counts.
    - ``RELEASE``: closes a session.
    - ``STOP``: ends the process.
    - ``DRAFT``: a forward pass of a shared draft (``shared_draft.Calls``).
    - ``QUERY``: asks the last rank for distributions that it keeps (``kept_rows.Query``).
    - ``BEGIN_TIMED``, ``END_TIMED``: a timed run begins or ends, in all sessions.

    To rank 0, within a step:

    - ``ANSWERS``: of the last rank (tuple of ``Answers``).
    - ``EXITS``: candidates of a rank with early exits (tuple of ``Exits``).
    - ``HIDDEN``, ``EARLY``: hidden states that a part needs with the answers, or before them
      (``States``).
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


REPLIES = (Kind.ANSWERS, Kind.EXITS, Kind.HIDDEN, Kind.EARLY, Kind.ROWS)

ReplyKey: TypeAlias = tuple[Kind, int]  # kind of a reply, and the rank that sends it


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedRequest:
    """The part of a request that ranks receive."""

    id: int
    max_cached: int  # maximum number of tokens in its caches
    sampling: SamplingParams
    tokens: IntArray  # int64[T], the prompt, if the transform reads it; otherwise empty


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    closes: tuple[int, ...] = ()
    opens: tuple[OpenedRequest, ...] = ()
    batch: Batch

    @property
    def is_empty(self) -> bool:
        return not (self.closes or self.opens or self.batch.num_tokens)


class Ending(NamedTuple):
    entry: Entry
    commits: tuple[Commit, ...]


class States(NamedTuple):
    """Hidden states [R, E] of the rows of ``batch``, one tensor per name in the rank's plan."""

    batch: Batch
    states: list[torch.Tensor]


class Message(NamedTuple):
    kind: Kind
    session: int = 0
    tick: int = 0
    body: Any = None

    def pack(self) -> IntArray:
        file = io.BytesIO()
        pickler = pickle.Pickler(file, pickle.HIGHEST_PROTOCOL)
        pickler.dispatch_table = _REDUCERS
        pickler.dump(tuple(self))
        data = file.getbuffer()
        packed = np.empty(1 - -len(data) // _WORD, np.int64)
        packed[0] = len(packed)
        packed[1:].view(np.uint8)[: len(data)] = data
        return packed

    @staticmethod
    def unpack(packed: IntArray) -> Message:
        # The message comes from a rank of the same job.
        kind, *rest = pickle.loads(packed[1:].view(np.uint8).data)  # noqa: S301
        return Message(Kind(kind), *rest)


def _reduce_tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Pickles the values alone, on the host: torch's own way takes longer than small tensors."""
    data = tensor.detach().cpu().contiguous().view(torch.uint8).numpy()
    return _tensor, (data, tensor.dtype)


def _tensor(data: npt.NDArray[np.uint8], dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(data).view(dtype)


_REDUCERS = {**copyreg.dispatch_table, torch.Tensor: _reduce_tensor}


# ---------------------------------------------------------------------- keys of the store

HEARTBEAT_S = 1.0

ANY_FAILED = "failed"  # this key is set after the first ``failed_key`` of any rank


def started_key(rank: int) -> str:
    return f"started/{rank}"


def ready_key(session: int, rank: int) -> str:
    return f"ready/{session}/{rank}"


def heartbeat_key(rank: int) -> str:
    """Its value is JSON [counter, name of the rank's current operation]."""
    return f"heartbeat/{rank}"


def failed_key(rank: int) -> str:
    """Its value says why the rank ended, as JSON (``worker.serve``)."""
    return f"failed/{rank}"


def captured_key(number: int, rank: int) -> str:
    return f"captured/{number}/{rank}"


def report_key(session: int, number: int, rank: int) -> str:
    """Its value is the rank's answer to report request ``number``, as JSON."""
    return f"report/{session}/{number}/{rank}"
