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
    """Samples from the target's logits with the request's own transform and keyed draws.

    If the transform has logits processors, a node's history is rebuilt from the rows that passed
    through the executor, so processors see what they would see token by token, on any rank.
    """

    def __init__(self, *, sampler: TargetSampler) -> None:
        """Uses ``sampler`` for every request."""
        self._sampler = sampler
        self._requests: dict[int, AnsweredRequest] = {}
        self._paths = HistoryTracker()

    def open(self, request: AnsweredRequest) -> None:
        """Starts a request."""
        self._requests[request.id] = request
        if request.sampling.needs_history:
            self._paths.open(request.id, request.tokens)

    def answer(self, batch: Batch, logits: torch.Tensor | None) -> tuple[Answers, ...]:
        """Samples the token after every tree row of the batch; ``logits``: [tree rows, V]."""
        assert logits is not None, "the last stage must compute logits"
        queries = []
        for rows in batch.trees:
            request = self._requests[rows.request]
            histories = None
            if request.sampling.needs_history:
                self._paths.observe(rows)
                histories = self._paths.histories(rows.request, rows.node_ids)
            queries.append(AnswerRequest(request, rows.node_ids, rows.positions, histories))
        return self._sampler.answer(queries, logits) if queries else ()

    def commit(self, commits: Sequence[Commit]) -> None:
        """Moves retired nodes into the histories."""
        for commit in commits:
            if self._requests[commit.request].sampling.needs_history:
                self._paths.commit(commit)

    def close(self, request_id: int) -> None:
        """Drops the request."""
        request = self._requests.pop(request_id, None)
        if request is not None and request.sampling.needs_history:
            self._paths.close(request_id)
