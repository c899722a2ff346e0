"""Sampling of the target's next tokens from its logits, on the rank of the last stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from specdec.sampling.history import HistoryTracker
from specdec.sampling.transform import AnswerRequest, SamplingParams, TargetSampler
from specdec.types import Answers, Batch, Commit, IntArray


class AnsweredRequest(Protocol):
    """The part of ``RequestState`` that an answerer reads."""

    @property
    def id(self) -> int: ...

    @property
    def sampling(self) -> SamplingParams: ...

    @property
    def tokens(self) -> IntArray:
        """int64[T], the prompt; read only if the sampling transform needs histories."""
        ...


class Answerer(Protocol):
    """Turns a batch that left the last stage into answers."""

    def open(self, request: AnsweredRequest) -> None: ...

    def answer(self, batch: Batch, logits: torch.Tensor | None) -> tuple[Answers, ...]:
        """One ``Answers`` per request with tree rows; ``logits``: [tree rows, V]."""
        ...

    def commit(self, commits: Sequence[Commit]) -> None: ...

    def close(self, request_id: int) -> None: ...


class ModelAnswerer:
    """Samples from the target's logits with the request's own transform and keyed draws."""

    def __init__(self, *, sampler: TargetSampler) -> None:
        """Uses ``sampler`` for every request."""
        self._sampler = sampler
        self._requests: dict[int, AnsweredRequest] = {}
        self._paths = HistoryTracker()

    def open(self, request: AnsweredRequest) -> None:
        """Starts a request."""
        self._requests[request.id] = request
        self._paths.open(request.id, request.tokens, request.sampling)

    def answer(self, batch: Batch, logits: torch.Tensor | None) -> tuple[Answers, ...]:
        """Samples the token after every tree row of the batch; ``logits``: [tree rows, V]."""
        assert logits is not None, "the last stage must compute logits"
        queries = []
        for rows in batch.trees:
            request, histories = self._requests[rows.request], self._paths.observe(rows)
            queries.append(AnswerRequest(request, rows.node_ids, rows.positions, histories))
        return self._sampler.answer(queries, logits) if queries else ()

    def commit(self, commits: Sequence[Commit]) -> None:
        """Moves retired nodes into the histories."""
        self._paths.commit(commits)

    def close(self, request_id: int) -> None:
        """Drops the request."""
        self._requests.pop(request_id, None)
        self._paths.close(request_id)
