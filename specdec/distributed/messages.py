"""Messages between rank 0, which runs the decode loop, and other ranks; keys of the shared store.

Messages are pickled, which is safe within one job. Ranks report their state in the store.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from dataclasses import dataclass
from enum import IntEnum, auto
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from specdec.executors.stage import OpenedRequest
from specdec.types import Batch, Commit, IntArray

_WORD = 8


class Kind(IntEnum):
    """Kinds of messages; comments name the type of ``Message.body`` in parentheses. Other ranks
    send those in ``REPLIES`` to rank 0 within a step; rank 0 sends all others.
    """

    SETUP = auto()  # opens a session (its plan)
    BEGIN = auto()  # a step's batch, to the first stage; to all if they run free (``Entry``)
    END = auto()  # the step's commits, and its batch for the later stages (``Ending``)
    REPORT = auto()  # requests the rank's counts
    RELEASE = auto()  # closes a session
    STOP = auto()  # ends the process
    DRAFT = auto()  # a forward pass of a shared draft (``shared_draft.Calls``)
    BEGIN_TIMED = auto()  # a timed run begins, in all sessions
    END_TIMED = auto()
    ANSWERS = auto()  # of the last rank (tuple of ``Answers``)
    EXITS = auto()  # candidates of a rank with early exits (tuple of ``Exits``)
    HIDDEN = auto()  # hidden states that a part needs with the answers (``States``)
    EARLY = auto()  # the same before the answers


REPLIES = (Kind.ANSWERS, Kind.EXITS, Kind.HIDDEN, Kind.EARLY)

ReplyKey: TypeAlias = tuple[Kind, int]  # kind of a reply, and the rank that sends it


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
    """Hidden states [rows of ``batch``, hidden size], one tensor per name in the rank's plan."""

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
    """Pickles a tensor as host values; for small tensors this is faster than torch's reducer."""
    data = tensor.detach().cpu().contiguous().view(torch.uint8).numpy()
    return _tensor, (data, tensor.dtype)


def _tensor(data: npt.NDArray[np.uint8], dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(data).view(dtype)


_REDUCERS = {**copyreg.dispatch_table, torch.Tensor: _reduce_tensor}


# ---------------------------------------------------------------------- keys of the store

HEARTBEAT_S = 1.0

ANY_FAILED = "failed"  # this key is set after the first failure of any rank


def store_key(what: str, *numbers: int) -> str:
    """Returns the store key ``what``/number/..., such as heartbeat/3. Ranks set started/RANK,
    ready/SESSION/RANK, heartbeat/RANK (JSON [counter, current operation]), failed/RANK (JSON, why
    it ended: ``worker.serve``) and report/SESSION/NUMBER/RANK (JSON reply to request NUMBER).
    """
    return "/".join(map(str, (what, *numbers)))
