"""A pipeline stage: a slice of the target's layers with one cache per request.

One step is compute, prune, transmit (SpecPipe Algorithm 1, PipeDec 3.4): every stage computes its
batch (``PipelineStage.compute``), the commit prunes caches and the rows between stages
(``InFlightRows``), and the surviving rows move to the next stage. The in-process pipeline calls its
stages one after the other; a rank of the distributed one has a single stage, and receives commits
as messages. All decisions are made by the controller. After the last stage the target's next tokens
are sampled from its logits.

Shape letters: R rows of a batch, W tree rows, T prompt tokens, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple, Self, TypeAlias

import numpy as np
import torch

from specdec.attention.tree_attention import BlockPool, TreeCache
from specdec.device import Probs, to_device
from specdec.errors import UserError
from specdec.models.runner import ModelRunner
from specdec.sampling.keyed_draws import KeyedDraws, Purpose
from specdec.sampling.transform import (
    HistoryTracker,
    SamplingParams,
    SamplingTransform,
    candidates_of,
    draw,
)
from specdec.state import RequestState
from specdec.types import (
    NO_TOKEN,
    Answers,
    Batch,
    Commit,
    EarlyHidden,
    Exits,
    FloatArray,
    HiddenName,
    IntArray,
    Output,
    PrefillChunk,
    PromptHidden,
    TreeRows,
)

_NONE = np.zeros(0, np.int64)
_NO_DRAWS = np.zeros(0)  # what greedy decoding needs
_FEW_LOGITS = 1 << 18  # of all rows: their argmax takes less than a walk along the path

# ---------------------------------------------------------------------- rows of a batch


class RowItem(NamedTuple):
    """Rows of one request in a packed batch: first those of its prompt, then those of its nodes."""

    request: int
    prefill: PrefillChunk | None
    tree: TreeRows | None
    prompt_rows: slice
    tree_rows: slice

    @property
    def prefill_tokens(self) -> IntArray:
        return _NONE if self.prefill is None else self.prefill.tokens


def row_items(batch: Batch) -> list[RowItem]:
    chunks = {chunk.request: chunk for chunk in batch.prefills}
    parts: list[tuple[int, PrefillChunk | None, TreeRows | None]] = [
        (tree.request, chunks.pop(tree.request, None), tree) for tree in batch.trees
    ]
    parts += [(request, chunk, None) for request, chunk in chunks.items()]
    items, start = [], 0
    for request, chunk, tree in parts:
        middle = start + (0 if chunk is None else len(chunk.tokens))
        stop = middle + (0 if tree is None else len(tree.tokens))
        items.append(RowItem(request, chunk, tree, slice(start, middle), slice(middle, stop)))
        start = stop
    return items


def tree_row_index(items: Sequence[RowItem]) -> IntArray:
    return np.concatenate([_NONE, *(_index(item.tree_rows) for item in items)])


def _index(rows: slice) -> IntArray:
    return np.arange(rows.start, rows.stop)


def tree_slices(trees: Sequence[TreeRows]) -> Iterator[tuple[TreeRows, slice]]:
    """Yields each request's tree with the slice of its rows among the tree rows of a batch."""
    start = 0
    for tree in trees:
        stop = start + len(tree.tokens)
        yield tree, slice(start, stop)
        start = stop


def with_hidden(
    output: Output, batch: Batch, captured: Mapping[HiddenName, torch.Tensor]
) -> Output:
    """Returns ``output`` with hidden states ``captured`` (name -> [R, E], rows as in ``row_items``)
    after all layers: of tree nodes in their ``Answers``, of prompt tokens in ``Output.prompts``.
    """
    answers = {answer.request: answer for answer in output.answers}
    prompts, trees = _by_item(batch, captured)
    for rows, hidden in trees:
        answers[rows.request] = replace(answers[rows.request], hidden=hidden)
    return replace(output, answers=tuple(answers.values()), prompts=(*output.prompts, *prompts))


def with_early(output: Output, batch: Batch, captured: Mapping[HiddenName, torch.Tensor]) -> Output:
    """Adds early hidden states (name -> [R, E]) of a batch that has passed only some layers."""
    if not captured:
        return output
    prompts, trees = _by_item(batch, captured)
    early = tuple(
        EarlyHidden(request=rows.request, node_ids=rows.node_ids, hidden=hidden)
        for rows, hidden in trees
    )
    return replace(output, early=output.early + early, prompts=(*output.prompts, *prompts))


_Hidden: TypeAlias = dict[HiddenName, torch.Tensor]


def _by_item(
    batch: Batch, captured: Mapping[HiddenName, torch.Tensor]
) -> tuple[list[PromptHidden], list[tuple[TreeRows, _Hidden]]]:
    """Splits packed states into those of each prefill chunk and of each request's tree rows."""
    prompts, trees = [], []
    for item in row_items(batch):
        if (chunk := item.prefill) is not None:
            states = {name: rows[item.prompt_rows] for name, rows in captured.items()}
            prompts.append(PromptHidden(request=chunk.request, start=chunk.start, hidden=states))
        if item.tree is not None:
            states = {name: rows[item.tree_rows] for name, rows in captured.items()}
            trees.append((item.tree, states))
    return prompts, trees


# ---------------------------------------------------------------------- rows in flight


@dataclass(slots=True)
class InFlight:
    batch: Batch  # the rows that have not been pruned
    # [R, E], output of the previous stage; None before the first stage and for stages without a
    # model
    hidden: torch.Tensor | None = None
    # name -> [R, E], hidden states captured by earlier stages
    captured: dict[HiddenName, torch.Tensor] = field(default_factory=dict)
    version: int = 0  # version of ``InFlightRows`` when rows were last pruned

    def prune(self, commits: Mapping[int, Commit], closed: Collection[int] = ()) -> IntArray:
        """Drops rows of nodes that a commit did not keep, and all rows of closed requests (SpecPipe
        3.3.2, second phase of a step); returns the indices of the rows left.
        """
        num_rows = self.batch.num_tokens
        self.batch, index = _surviving(self.batch, commits, closed)
        if self.hidden is not None and len(index) < num_rows:
            # Indices instead of a mask: indexing by a device mask synchronizes with the device.
            rows = to_device(index, self.hidden.device)
            self.hidden = self.hidden[rows]
            self.captured = {name: states[rows] for name, states in self.captured.items()}
        return index


def _surviving(
    batch: Batch, commits: Mapping[int, Commit], closed: Collection[int]
) -> tuple[Batch, IntArray]:
    """Returns a batch of the rows left, and their packed indices; prompt rows are never pruned."""
    trees, prefills, index = [], [], [_NONE]
    for item in row_items(batch):
        if item.request in closed:
            continue
        if item.prefill is not None:
            prefills.append(item.prefill)
            index.append(_index(item.prompt_rows))
        if item.tree is not None:
            rows, tree, commit = _index(item.tree_rows), item.tree, commits.get(item.request)
            if commit is not None:
                kept = commit.keeps(tree.node_ids).nonzero()[0]
                rows, tree = rows[kept], tree.take(kept)
            if len(rows):
                trees.append(tree)
                index.append(rows)
    left = replace(batch, trees=tuple(trees), prefills=tuple(prefills))
    return left, np.concatenate(index)


class InFlightRows:
    """The batches in flight, the open requests, and the latest commit of each request.

    The controller and all ranks see the same batches, commits, opens and closes in the same order,
    so they agree on how many rows cross each link without sending counts. Rows are pruned on demand
    by each request's latest commit alone: a node that it keeps was kept by all earlier commits.

    A *tick* is the executor's step number, which no new run resets. A batch is on stage n (from 1)
    in the n-th step from the tick at which it entered.
    """

    def __init__(self) -> None:
        self._flights: dict[int, InFlight] = {}
        self._opened: dict[int, int] = {}
        self._latest: dict[int, tuple[int, Commit]] = {}
        self._version = 0  # number of changes that may prune rows

    def open(self, request_id: int, tick: int) -> None:
        self._opened[request_id] = tick

    def close(self, request_id: int) -> None:
        self._version += 1
        self._opened.pop(request_id, None)
        self._latest.pop(request_id, None)

    def enter(self, tick: int, batch: Batch) -> None:
        if batch.num_tokens:
            self._flights[tick] = InFlight(batch, version=self._version)

    def commit(self, tick: int, commits: Sequence[Commit]) -> None:
        self._version += bool(commits)
        for commit in commits:
            self._latest[commit.request] = (tick, commit)
            if commit.finished:
                self._opened.pop(commit.request, None)

    def is_open(self, request_id: int, tick: int) -> bool:
        """Returns whether the request was open at ``tick``, and still is."""
        return self._opened.get(request_id, tick + 1) <= tick

    def prune(self, tick: int, flight: InFlight) -> IntArray:
        requests = {rows.request for rows in flight.batch.trees}
        requests.update(chunk.request for chunk in flight.batch.prefills)
        closed = {request_id for request_id in requests if not self.is_open(request_id, tick)}
        latest = {r: self._latest[r] for r in requests - closed if r in self._latest}
        commits = {r: commit for r, (at, commit) in latest.items() if at >= tick}
        return flight.prune(commits, closed)

    def alive(self, tick: int) -> InFlight | None:
        flight = self._flights.get(tick)
        if flight is not None:
            if flight.version != self._version:
                self.prune(tick, flight)
                flight.version = self._version
            if flight.batch.num_tokens:
                return flight
            del self._flights[tick]
        return None

    def take(self, tick: int) -> InFlight | None:
        flight = self.alive(tick)
        self.drop(tick)
        return flight

    def drop(self, tick: int) -> None:
        self._flights.pop(tick, None)


# ---------------------------------------------------------------------- stages


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOutput:
    # [R, E], input of the next stage; None for a stage without a model
    hidden: torch.Tensor | None = None
    logits: torch.Tensor | None = None  # [W, V] in the order of ``batch.trees``; last stage only
    # name -> [R, E], the hidden states that the stage captures
    captured: Mapping[HiddenName, torch.Tensor] = field(default_factory=dict)
    # number of target layers before an exit -> [W, V] of its head
    exit_logits: Mapping[int, torch.Tensor] = field(default_factory=dict)


class Stage:
    """A slice of the target. The base class has no model and computes nothing."""

    layers: ModelStage | None = None  # the slice of a model; None without one

    def open(self, request_id: int, max_len: int) -> None:
        """Allocates the cache of a request of at most ``max_len`` entries, nodes included."""

    def run(self, batch: Batch, hidden: torch.Tensor | None) -> StageOutput:
        """Computes the batch's rows from ``hidden`` [R, E] of the previous stage (first: None)."""
        return StageOutput()

    def commit(self, commits: Sequence[Commit]) -> None:
        """Moves entries of committed nodes into the prefix, and drops those of pruned nodes."""

    def close(self, request_id: int) -> None:
        """Frees the request's cache."""

    def paged(self, num_blocks: int | None, block_tokens: int) -> Self:
        """Makes the requests' caches share a pool of ``num_blocks`` blocks of ``block_tokens``
        tokens each; None: one cache per request. Returns the stage itself.
        """
        return self


class StageGroup(Stage):
    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts = parts

    def paged(self, num_blocks: int | None, block_tokens: int) -> Self:
        for part in self._parts:
            part.paged(num_blocks, block_tokens)
        return self

    def open(self, request_id: int, max_len: int) -> None:
        for part in self._parts:
            part.open(request_id, max_len)

    def commit(self, commits: Sequence[Commit]) -> None:
        for part in self._parts:
            part.commit(commits)

    def close(self, request_id: int) -> None:
        for part in self._parts:
            part.close(request_id)


class ModelStage(Stage):
    def __init__(self, *, runner: ModelRunner) -> None:
        self.runner = runner
        self.pool: BlockPool | None = None  # without one, each request has a cache of its own
        self.layers = self
        self._caches: dict[int, TreeCache] = {}

    def open(self, request_id: int, max_len: int) -> None:
        make, pool = self.runner.new_cache, self.pool
        self._caches[request_id] = make(max_len) if pool is None else make(max_len, pool)

    def run(
        self, batch: Batch, hidden: torch.Tensor | None, *, wants_logits: bool = True
    ) -> StageOutput:
        items = row_items(batch)
        rows = [
            self._caches[item.request].rows(prefix_tokens=item.prefill_tokens, tree=item.tree)
            for item in items
        ]
        logits_rows: IntArray | None = _NONE
        if wants_logits and self.runner.is_last and batch.trees:
            logits_rows = tree_row_index(items) if batch.prefills else None  # of every row
        out = self.runner.forward(rows, hidden=hidden, logits_rows=logits_rows)
        return StageOutput(hidden=out.hidden, logits=out.logits, captured=out.captured)

    def commit(self, commits: Sequence[Commit]) -> None:
        for commit in commits:
            self._caches[commit.request].commit(commit)

    def close(self, request_id: int) -> None:
        cache = self._caches.pop(request_id, None)
        if cache is not None:
            cache.close()

    def paged(self, num_blocks: int | None, block_tokens: int) -> Self:
        if num_blocks is not None:
            spec = self.runner.spec
            self.pool = BlockPool(spec=spec, num_blocks=num_blocks, block_tokens=block_tokens)
        return self

    def cache(self, request_id: int) -> TreeCache:
        return self._caches[request_id]


def split_layers(
    num_layers: int, num_stages: int, *, head_layers: float = 0.0
) -> list[tuple[int, int]]:
    """Returns half-open layer ranges, as even as possible, with the shorter stages last.

    The last stage also computes the output head, which costs as much as ``head_layers`` layers; the
    split minimizes the cost of the slowest stage.
    """
    if not 1 <= num_stages <= num_layers:
        raise UserError(
            f"executor.stages={num_stages} does not fit a target of {num_layers} layers;"
            f" choose 1 to {num_layers}"
        )
    sizes = [1] * num_stages
    costs = [1.0] * (num_stages - 1) + [1.0 + head_layers]
    for _ in range(num_layers - num_stages):
        cheapest = costs.index(min(costs))
        sizes[cheapest] += 1
        costs[cheapest] += 1.0
    bounds: IntArray = np.cumsum([0, *sizes])
    return [(int(a), int(b)) for a, b in pairwise(bounds)]


# ---------------------------------------------------------------------- answers


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedRequest:
    """The part of a ``RequestState`` that the process (rank) of a stage needs."""

    id: int
    max_cached: int  # maximum number of tokens in its caches
    sampling: SamplingParams
    tokens: IntArray  # int64[T], the prompt, if the transform reads it; otherwise empty


AnsweredRequest: TypeAlias = RequestState | OpenedRequest


class Answerer:
    def follow(self) -> None:
        """Allows later answers to omit tokens that no part needs (``Needs.all_answers``)."""

    def open(self, request: AnsweredRequest) -> None:
        """Prepares for a request that has been admitted."""

    def answer(self, batch: Batch, logits: torch.Tensor | None) -> tuple[Answers, ...]:
        """Returns one ``Answers`` per request with tree rows, from ``logits`` [W, V]."""
        raise NotImplementedError

    def commit(self, commits: Sequence[Commit]) -> None:
        """Applies the commits of a step."""

    def close(self, request_id: int) -> None:
        """Releases the state of a request that has finished."""


class OpenRequests:
    def __init__(self) -> None:
        self._transforms: dict[SamplingParams, SamplingTransform] = {}
        self._of: dict[int, SamplingTransform] = {}  # request id -> one of these
        self._paths = HistoryTracker()

    def open(self, request: AnsweredRequest) -> None:
        params = request.sampling
        self._of[request.id] = self._transforms.setdefault(params, SamplingTransform(params))
        if params.needs_history:
            self._paths.open(request.id, request.tokens)

    def commit(self, commits: Sequence[Commit]) -> None:
        self._paths.commit(commits)

    def close(self, request_id: int) -> None:
        self._of.pop(request_id, None)
        self._paths.close(request_id)


class ModelAnswerer(OpenRequests, Answerer):
    """Samples target tokens from logits by each request's sampling parameters and ``draws``."""

    def __init__(self, *, draws: KeyedDraws, needs_probs: bool) -> None:
        super().__init__()
        self._draws = draws
        self._needs_probs = needs_probs
        self._follows = False

    def follow(self) -> None:
        """Allows later answers to have ``NO_TOKEN`` for rows off the path of the target's tokens.
        A row is off it if it or an ancestor has another token than was sampled after its parent.
        """
        self._follows = True

    def answer(self, batch: Batch, logits: torch.Tensor | None) -> tuple[Answers, ...]:
        """Samples the target's next token after every tree row by its position's random number.

        If needed, answers also have the distributions after the sampling transform; for a greedy
        request those at temperature 1, by which lossy verifiers compare tokens. If all requests
        have the same sampling parameters, one call samples for all.
        """
        assert logits is not None, "the last stage must compute logits"
        if not batch.trees:
            return ()
        histories = [self._paths.observe(rows) for rows in batch.trees]
        if len({id(self._of[rows.request]) for rows in batch.trees}) == 1:
            return self._answers(batch.trees, logits, histories)
        parts = zip(tree_slices(batch.trees), histories, strict=True)
        return tuple(
            self._answers([tree], logits[rows], [known])[0] for (tree, rows), known in parts
        )

    def _answers(
        self,
        trees: Sequence[TreeRows],
        logits: torch.Tensor,
        histories: Sequence[list[IntArray] | None],
    ) -> tuple[Answers, ...]:
        tokens, probs = self._sample(trees, logits, histories)
        return tuple(
            Answers(
                request=tree.request,
                node_ids=tree.node_ids,
                tokens=tokens[rows],
                probs=None if probs is None else probs[rows],
            )
            for tree, rows in tree_slices(trees)
        )

    def _sample(
        self,
        trees: Sequence[TreeRows],
        logits: torch.Tensor,
        histories: Sequence[list[IntArray] | None],
    ) -> tuple[IntArray, Probs | None]:
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
    """Returns whether sampling all rows in one call likely takes longer than ``_along_paths``."""
    return logits.numel() > _FEW_LOGITS if params.greedy else len(logits) > 2


def _along_paths(
    transform: SamplingTransform,
    trees: Sequence[TreeRows],
    logits: torch.Tensor,
    uniforms: FloatArray,
    histories: Sequence[IntArray] | None,
) -> IntArray:
    """Returns sampled tokens int64[W]; rows off the path of these tokens get ``NO_TOKEN``."""
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
        rows = np.array(level)
        known = None if histories is None else [histories[row] for row in level]
        # One row is a view: a copy would wake torch's threads up, as in ``transform``.
        part = logits[level[0], None] if len(level) == 1 else logits[torch.from_numpy(rows)]
        found = transform.sample(part, uniforms[rows] if len(uniforms) else uniforms, known)
        tokens[rows] = found
        level = [
            child
            for row, token in zip(level, found.tolist(), strict=True)
            for child in children.get(row, ())
            if drafted[child] == token
        ]
    return tokens


class ExitReader(OpenRequests):
    def __init__(self, *, num_candidates: int, draws: KeyedDraws, sample: bool) -> None:
        """With ``sample``, candidates are sampled and come with their distributions (for rejection
        verifiers); otherwise they are the ``num_candidates`` most probable tokens.
        """
        super().__init__()
        self._k = num_candidates
        self._draws = draws
        self._sample = sample

    def read(self, batch: Batch, logits: torch.Tensor, layer: int) -> tuple[Exits, ...]:
        """Returns candidates of every tree row at the exit after ``layer`` layers, from ``logits``
        [W, V] in the order of ``batch.trees``.
        """
        exits = []
        for tree, rows in tree_slices(batch.trees):
            request, ids = tree.request, tree.node_ids
            candidates = candidates_of(
                self._of[request],
                logits[rows],
                self._k,
                self._paths.observe(tree),
                draws=self._draws if self._sample else None,
                request_id=request,
                positions=tree.positions,
            )
            exits.append(Exits(request=request, node_ids=ids, candidates=candidates, layer=layer))
        return tuple(exits)


# ---------------------------------------------------------------------- one stage's step


class PipelineStage:
    def __init__(
        self, stage: Stage, *, answerer: Answerer | None = None, exits: ExitReader | None = None
    ) -> None:
        self.stage = stage
        self.rows = 0
        self.answerer = answerer
        self._exits = exits
        self._readers = [reader for reader in (answerer, exits) if reader is not None]

    def open(self, request: AnsweredRequest) -> None:
        self.stage.open(request.id, request.max_cached)
        for reader in self._readers:
            reader.open(request)

    def compute(self, flight: InFlight) -> tuple[StageOutput, tuple[Exits, ...]]:
        self.rows += flight.batch.num_tokens
        out = self.stage.run(flight.batch, flight.hidden)
        flight.hidden = out.hidden
        exits: tuple[Exits, ...] = ()
        if self._exits is not None:
            for layer, logits in out.exit_logits.items():
                exits += self._exits.read(flight.batch, logits, layer)
        return out, exits

    def answer(self, batch: Batch, out: StageOutput) -> tuple[Answers, ...]:
        if self.answerer is None or not batch.trees:
            return ()
        return self.answerer.answer(batch, out.logits)

    def commit(self, commits: Sequence[Commit]) -> None:
        self.stage.commit(commits)
        for reader in self._readers:
            reader.commit(commits)

    def close(self, request_id: int) -> None:
        self.stage.close(request_id)
        for reader in self._readers:
            reader.close(request_id)
