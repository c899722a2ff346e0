"""Sampling of the target's next tokens from its logits, on the rank of the last stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from specdec.device import Probs
from specdec.sampling.keyed_draws import KeyedDraws, Purpose
from specdec.sampling.processors import HistoryTracker
from specdec.sampling.transform import SamplingParams, SamplingTransform, draw
from specdec.types import NO_TOKEN, Answers, Batch, Commit, FloatArray, IntArray, TreeRows

_NO_DRAWS = np.zeros(0)  # what greedy decoding needs
_FEW_LOGITS = 1 << 18  # of all rows: their argmax takes less than a walk along the path


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


class Answerer:
    """Turns a batch that left the last stage into answers."""

    def follow(self) -> None:
        """From now on, answers may leave out the tokens that ``Needs.all_answers`` names."""

    def open(self, request: AnsweredRequest) -> None:
        """A request is admitted."""

    def answer(self, batch: Batch, logits: torch.Tensor | None) -> tuple[Answers, ...]:
        """One ``Answers`` per request with tree rows; ``logits``: [tree rows, V]."""
        raise NotImplementedError

    def commit(self, commits: Sequence[Commit]) -> None:
        """Follows the commits of a step."""

    def close(self, request_id: int) -> None:
        """A request has finished."""


class ModelAnswerer(Answerer):
    """Samples from the target's logits with each request's own transform and keyed draws."""

    def __init__(self, *, draws: KeyedDraws, needs_probs: bool) -> None:
        """Creates the answerer of all requests.

        Args:
            draws: the run's keyed draws.
            needs_probs: whether answers include distributions (``Needs.target_probs``).
        """
        self._draws = draws
        self._needs_probs = needs_probs
        self._follows = False
        self._transforms: dict[SamplingParams, SamplingTransform] = {}
        self._of: dict[int, SamplingTransform] = {}  # request id -> one of these
        self._paths = HistoryTracker()

    def follow(self) -> None:
        """From now on, samples only after rows that may be on the target's path.

        A row whose parent in the batch gets another token than the row's is on no path, and gets
        ``NO_TOKEN``. Distributions, if needed, are still those of all rows.
        """
        self._follows = True

    def open(self, request: AnsweredRequest) -> None:
        """Starts a request."""
        params = request.sampling
        if params not in self._transforms:
            self._transforms[params] = SamplingTransform(params)
        self._of[request.id] = self._transforms[params]
        if request.sampling.needs_history:
            self._paths.open(request.id, request.tokens)

    def answer(self, batch: Batch, logits: torch.Tensor | None) -> tuple[Answers, ...]:
        """Samples the target's next token after every tree row by its keyed draw.

        If probabilities are needed, the answers include the processed distributions; for a greedy
        request the model's own at temperature 1, by which lossy verifiers compare tokens (the
        one-hot distribution of greedy decoding follows from the tokens). If all requests have equal
        parameters they share one call, and one copy from a device.

        Args:
            batch: the rows.
            logits: [tree rows, V].
        """
        assert logits is not None, "the last stage must compute logits"
        if not batch.trees:
            return ()
        histories = [self._paths.observe(rows) for rows in batch.trees]
        if len({id(self._of[rows.request]) for rows in batch.trees}) == 1:
            return self._answers(batch.trees, logits, histories)
        parts = zip(
            batch.trees,
            logits.split([len(rows.node_ids) for rows in batch.trees]),
            histories,
            strict=True,
        )
        return tuple(self._answers([rows], part, [known])[0] for rows, part, known in parts)

    def commit(self, commits: Sequence[Commit]) -> None:
        """Moves retired nodes into the histories."""
        self._paths.commit(commits)

    def close(self, request_id: int) -> None:
        """Drops the request."""
        self._of.pop(request_id, None)
        self._paths.close(request_id)

    def _answers(
        self,
        trees: Sequence[TreeRows],
        logits: torch.Tensor,
        histories: Sequence[list[IntArray] | None],
    ) -> tuple[Answers, ...]:
        """Answers of requests with equal parameters."""
        tokens, probs = self._sample(trees, logits, histories)
        answers, start = [], 0
        for tree in trees:
            rows = slice(start, start + len(tree.node_ids))
            answers.append(
                Answers(
                    request=tree.request,
                    node_ids=tree.node_ids,
                    tokens=tokens[rows],
                    probs=None if probs is None else probs[rows],
                )
            )
            start = rows.stop
        return tuple(answers)

    def _sample(
        self,
        trees: Sequence[TreeRows],
        logits: torch.Tensor,
        histories: Sequence[list[IntArray] | None],
    ) -> tuple[IntArray, Probs | None]:
        """Tokens and, if needed, distributions of requests with equal parameters."""
        transform = self._of[trees[0].request]
        params = transform.params
        uniforms = _NO_DRAWS
        if not params.greedy:
            draws = [self._draws.uniform(t.request, t.positions + 1, Purpose.TARGET) for t in trees]
            uniforms = draws[0] if len(draws) == 1 else np.concatenate(draws)
        known = [h for part in histories for h in part or ()] if params.needs_history else None
        if not self._needs_probs:
            if self._follows and logits.is_cpu and _is_slow(params, logits):
                return _along_paths(transform, trees, logits, uniforms, known), None
            return transform.sample(logits, uniforms, known), None
        if params.greedy:
            tokens = transform.sample(logits, uniforms, known)
            return tokens, transform.proposal_probs(logits, known)
        distribution = transform.distribution(logits, known)
        return draw(distribution, uniforms), distribution


def _is_slow(params: SamplingParams, logits: torch.Tensor) -> bool:
    """Whether a walk along the path takes less than one call for all rows."""
    return logits.numel() > _FEW_LOGITS if params.greedy else len(logits) > 2


def _along_paths(
    transform: SamplingTransform,
    trees: Sequence[TreeRows],
    logits: torch.Tensor,
    uniforms: FloatArray,
    histories: Sequence[IntArray] | None,
) -> IntArray:
    """int64[A]: the tokens after the rows that may be on a path, level by level."""
    tokens = np.full(len(logits), NO_TOKEN)
    drafted: list[int] = []
    children: dict[int, list[int]] = {}  # row -> rows of its children in the batch
    level: list[int] = []
    for tree in trees:
        row_of: dict[int, int] = {}
        drafted += tree.tokens.tolist()
        ids = zip(tree.node_ids.tolist(), tree.parent_ids.tolist(), strict=True)
        for row, (node_id, parent_id) in enumerate(ids, len(drafted) - len(tree.tokens)):
            row_of[node_id] = row
            above = row_of.get(parent_id)
            if above is None:
                level.append(row)
            else:
                children.setdefault(above, []).append(row)
    while level:
        if len(level) == 1:
            rows: slice | IntArray = slice(level[0], level[0] + 1)
            part = logits[rows]
        else:
            rows = np.array(level)
            part = logits[torch.from_numpy(rows)]
        known = None if histories is None else [histories[row] for row in level]
        found = transform.sample(part, uniforms[rows] if len(uniforms) else uniforms, known)
        tokens[rows] = found
        level = [
            child
            for row, token in zip(level, found.tolist(), strict=True)
            for child in children.get(row, ())
            if drafted[child] == token
        ]
    return tokens
