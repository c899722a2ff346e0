"""The data that the parts of a strategy exchange, in the order of a decoding step.

Trees, candidates and commits are numpy arrays: they are small, and at these sizes a numpy call
costs a fifth of a torch call. Model values (logits, hidden states) are torch tensors.

Shape letters: W nodes, A answered nodes, D accepted nodes or nodes of the longest path, M kept
nodes, K candidates per node, V vocabulary, T tokens, E hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from specdec.device import Probs, concatenate, on_host

IntArray: TypeAlias = npt.NDArray[np.int64]
FloatArray: TypeAlias = npt.NDArray[np.float64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]

NO_NODE = -1
"""The parent id of a root, and the id or slot of a node that does not exist."""

NO_TOKEN = -1
"""Value in ``Answers.tokens`` for a node off the target's path, whose next token is not needed."""

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Nodes:
    """Node ids of one or more requests. Arrays about these nodes have one row per node, in the
    order of ``items`` (*packed order*).

    Attributes:
        items: one pair (request id, node ids int64[W_r]) per request.
    """

    items: tuple[tuple[int, IntArray], ...] = ()

    def __len__(self) -> int:
        return sum([len(ids) for _, ids in self.items])

    def packed(self) -> Iterator[tuple[int, IntArray, slice]]:
        """Yields per request (id, node ids int64[W_r], slice of their rows in packed order)."""
        start = 0
        for request_id, ids in self.items:
            stop = start + len(ids)
            yield request_id, ids, slice(start, stop)
            start = stop

    def where(self, mask: BoolArray) -> Nodes:
        selected = [(request_id, ids[mask[rows]]) for request_id, ids, rows in self.packed()]
        return Nodes(tuple(item for item in selected if len(item[1])))


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Proposed children of W nodes, with one row per node in packed order (``Nodes``).

    Attributes:
        tokens: int64[W, K], most probable first, or in sampling order if they were sampled.
        logprobs: float64[W, K], log draft probability given the node (<= 0).
        counts: int64[W], valid entries per row; 0 if the source has no proposal (yet).
        probs: float64[W, V], the distributions from which the candidates were sampled; None unless
            the verifier needs them.
        origins: int64[W, K], index of the proposing source (0 is the main one); None if all are 0.
    """

    tokens: IntArray
    logprobs: FloatArray
    counts: IntArray
    probs: Probs | None = None
    origins: IntArray | None = None

    @staticmethod
    def empty(num_nodes: int, num_candidates: int = 1) -> Candidates:
        shape = (num_nodes, num_candidates)
        return Candidates(
            tokens=np.zeros(shape, np.int64),
            logprobs=np.full(shape, -np.inf),
            counts=np.zeros(num_nodes, np.int64),
        )

    @staticmethod
    def joined(parts: Sequence[Candidates]) -> Candidates:
        if len(parts) == 1:
            return parts[0]
        assert all(part.origins is None for part in parts), "origins would be lost"
        probs = [part.probs for part in parts if part.probs is not None]
        return Candidates(
            tokens=np.concatenate([part.tokens for part in parts]),
            logprobs=np.concatenate([part.logprobs for part in parts]),
            counts=np.concatenate([part.counts for part in parts]),
            probs=concatenate(probs) if probs else None,
        )

    def take(self, rows: IntArray) -> Candidates:
        """Returns the rows with the indices ``rows``, int64[W], which may repeat."""
        return Candidates(
            tokens=self.tokens[rows],
            logprobs=self.logprobs[rows],
            counts=self.counts[rows],
            probs=None if self.probs is None else self.probs[rows],
            origins=None if self.origins is None else self.origins[rows],
        )

    def spread(self, mask: BoolArray) -> Candidates:
        """Returns candidates of W nodes, with this object's rows at the true entries of ``mask``,
        bool[W]. The other nodes get no candidates; their ``probs``, if there are any, are uniform.
        """
        num_nodes = len(mask)
        full = Candidates.empty(num_nodes, self.tokens.shape[1])
        full.tokens[mask] = self.tokens
        full.logprobs[mask] = self.logprobs
        full.counts[mask] = self.counts
        probs = origins = None
        if self.probs is not None:
            probs = np.full((num_nodes, self.probs.shape[1]), 1.0 / self.probs.shape[1])
            probs[mask] = on_host(self.probs)
        if self.origins is not None:
            origins = np.zeros(full.tokens.shape, np.int64)
            origins[mask] = self.origins
        return replace(full, probs=probs, origins=origins)


class Lossless(StrEnum):
    """The guarantee that a verifier gives.

    ``TOKEN``: the output equals plain decoding with the same seed, token for token.
    ``DISTRIBUTION``: every token is distributed as under the target. ``LOSSY``: neither; results
    are marked as lossy wherever they are printed.
    """

    TOKEN = "token"  # noqa: S105 - a label, not a secret
    DISTRIBUTION = "distribution"
    LOSSY = "lossy"


class HiddenName(NamedTuple):
    """Identifies a hidden state of the target: the output of a layer, counted from 0.

    ``normed``: the state after the model's final norm, the input of the output head; only possible
    for the last layer. If False, the state is the residual stream, before any norm.
    """

    layer: int
    normed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Inputs that a source or verifier requires from other parts; checked before decoding.

    Attributes:
        target_probs: the target's full distribution after sampling transforms, per answered node.
        draft_probs: the draft's full distribution per expanded node, from which candidates are
            sampled.
        target_draws: the random numbers by which the target samples its tokens (``match`` only).
        hidden: hidden states of all rows, prompt rows included, delivered with the row's answer.
        early_hidden: hidden states of all rows as soon as the layer has computed them.
        exits: number of candidates per node in ``Output.exits``; 0 if no exits are needed.
        further_exits: number of layers before each further exit, besides the pair's exit layer.
        real_nodes: ``expand`` must receive nodes of the requests' trees, not of ``StagedSource``'s.
        all_answers: the target's next token after every answered node. If False, an executor may,
            under ``Lossless.TOKEN``, omit it for nodes off the target's path (``Answers.tokens``).
    """

    target_probs: bool = False
    draft_probs: bool = False
    target_draws: bool = False
    hidden: tuple[HiddenName, ...] = ()
    early_hidden: tuple[HiddenName, ...] = ()
    exits: int = 0
    further_exits: tuple[int, ...] = ()
    real_nodes: bool = False
    all_answers: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a model runs: ``stages`` pipeline stages, each split over ``degree`` devices.

    ``ranks`` are the devices' ranks (of clocks and of processes) in layer order; rank 0 is the
    controller. ``weight_bytes`` has the bytes of weights on each of these devices.
    """

    ranks: tuple[int, ...]
    weight_bytes: tuple[int, ...]
    stages: int = 1
    degree: int = 1


@dataclass(frozen=True, kw_only=True)
class ExecutorPlan:
    """Properties of an executor that is not built yet. ``latency`` and ``in_flight`` are those of
    ``Executor``; ``placements`` maps a model's name to where it runs.
    """

    latency: int | None
    in_flight: int
    placements: Mapping[str, Placement]

    @property
    def num_ranks(self) -> int:
        """Number of ranks (devices), without rank 0, the controller."""
        return max(rank for placement in self.placements.values() for rank in placement.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeRows:
    """Tree nodes of one request as rows of a forward pass, parents before children.

    Attributes:
        prefix_len: number of committed tokens before the root at submission.
        tokens: int64[W].
        paths: int64[D, W], from which caches derive attention masks. Row 0 has the nodes' own ids,
            row i the ids of their ancestors i levels above, up to the root at submission, and
            ``NO_NODE`` above that root.
    """

    request: int
    prefix_len: int
    tokens: IntArray
    paths: IntArray

    @staticmethod
    def within(
        *,
        prefix_len: int,
        node_ids: IntArray,
        tokens: IntArray,
        parent_ids: IntArray,
        request: int = 0,
    ) -> TreeRows:
        """Builds rows of W nodes; a node whose parent is not in ``node_ids`` is a root."""
        parent_of = dict(zip(node_ids.tolist(), parent_ids.tolist(), strict=True))
        paths, level = list[list[int]](), node_ids.tolist()
        while not paths or any(node_id != NO_NODE for node_id in level):
            assert len(paths) <= len(level), "a node is its own ancestor"
            paths.append(level)
            parents = [parent_of.get(node_id, NO_NODE) for node_id in level]
            level = [node_id if node_id in parent_of else NO_NODE for node_id in parents]
        return TreeRows(
            request=request, prefix_len=prefix_len, tokens=tokens, paths=np.array(paths, np.int64)
        )

    @property
    def node_ids(self) -> IntArray:
        return self.paths[0]

    @property
    def parent_ids(self) -> IntArray:
        """int64[W], id of each node's parent; ``NO_NODE`` for the root."""
        return self.paths[1] if len(self.paths) > 1 else np.full_like(self.tokens, NO_NODE)

    @property
    def depths(self) -> IntArray:
        """int64[W], distance of each node from the root at submission."""
        depths: IntArray = np.add.reduce(self.paths != NO_NODE) - 1
        return depths

    @property
    def positions(self) -> IntArray:
        """int64[W], absolute position of each node in the sequence; no commit changes it."""
        return self.prefix_len + self.depths

    def keep(self, mask: BoolArray) -> TreeRows:
        return self.take(mask.nonzero()[0])

    def take(self, rows: IntArray) -> TreeRows:
        return TreeRows(
            request=self.request,
            prefix_len=self.prefix_len,
            tokens=self.tokens.take(rows),
            paths=self.paths.take(rows, axis=1),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunk:
    """Consecutive prompt tokens of one request, from position ``start`` on, to prefill under a
    causal mask. The prompt's last token is in no chunk, because it is the first tree's root.
    """

    request: int
    start: int
    tokens: IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows submitted to the target in one step; an empty batch only advances the step.

    A request's prefill chunks come before its first tree nodes. ``num_tokens`` counts tree nodes
    and prefill tokens. ``warm_up``: the batch belongs to the warm-up run, which is excluded from
    all metrics.
    """

    step: int
    trees: tuple[TreeRows, ...] = ()
    prefills: tuple[PrefillChunk, ...] = ()
    warm_up: bool = False
    num_nodes: int = field(init=False, repr=False, compare=False)
    num_tokens: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Counted once: every part of a step reads them.
        nodes = sum([len(rows.node_ids) for rows in self.trees])
        object.__setattr__(self, "num_nodes", nodes)
        tokens = nodes + sum([len(chunk.tokens) for chunk in self.prefills])
        object.__setattr__(self, "num_tokens", tokens)


@dataclass(slots=True, kw_only=True, eq=False)
class Ticket:
    """A draft pass in flight, which expands ``nodes``.

    Attributes:
        due_s: time on the run's clock at which the pass ends; None if it is not known in advance.
        level: index of the model that runs the pass (0 is the draft); see ``Events.start``.
        candidates: the result, if the pass was computed when it started.
    """

    nodes: Nodes
    due_s: float | None = None
    level: int = 0
    candidates: Candidates | None = None


class EventKind(StrEnum):
    """What can happen while a policy waits.

    ``TARGET``: ``Executor.collect`` would return without waiting. ``DRAFT``: a draft pass has
    ended. ``EARLY``: exits or early hidden states have arrived.
    """

    TARGET = "target"
    DRAFT = "draft"
    EARLY = "early"


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened while a policy waited.

    ``ticket`` is the draft pass that ended. ``candidates`` is its result if a model other than the
    draft ran it (``Ticket.level`` above 0); the draft's results are in the trees already.
    """

    kind: EventKind
    ticket: Ticket | None = None
    candidates: Candidates | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The target's next tokens after nodes of one request.

    Attributes:
        tokens: int64[A], the target's own next token after each node; ``NO_TOKEN`` where the
            executor omits it (``Needs.all_answers``).
        probs: float64[A, V], distributions after sampling transforms, if a part needs them.
        hidden: name -> [A, E], in the target's dtype, if a part needs them.
    """

    request: int
    node_ids: IntArray
    tokens: IntArray
    probs: Probs | None = None
    hidden: Mapping[HiddenName, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exits:
    """Proposals of one exit head after ``layer`` layers for nodes of one request (PPSD Alg. 1,
    lines 13 and 29).
    """

    request: int
    node_ids: IntArray
    candidates: Candidates
    layer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptHidden:
    """Hidden states, name -> [T, E], of a prefill chunk that begins at position ``start``, in the
    target's dtype.
    """

    request: int
    start: int
    hidden: Mapping[HiddenName, torch.Tensor]

    @property
    def last_position(self) -> int:
        return self.start + len(next(iter(self.hidden.values()))) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyHidden:
    """Hidden states, name -> [W, E], of nodes of one request that may not be answered yet."""

    request: int
    node_ids: IntArray
    hidden: Mapping[HiddenName, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The results of an executor in one step.

    Attributes:
        answers: answers that arrived in this step, also those to earlier batches; a request may
            have several.
        exits: proposals for nodes that passed an exit layer in this step, on any stage.
        prompts: hidden states of prefill chunks that left the target (``Needs.hidden``) and, as
            separate entries, of chunks that passed the layer (``Needs.early_hidden``).
        early: hidden states in ``Needs.early_hidden`` of nodes that passed the layer in this step.
    """

    step: int
    answers: tuple[Answers, ...] = ()
    exits: tuple[Exits, ...] = ()
    prompts: tuple[PromptHidden, ...] = ()
    early: tuple[EarlyHidden, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A verifier's decision for one request.

    Attributes:
        accepted_ids: int64[D], ids of the accepted nodes, a path below the root; all are answered.
        next_token: the correction or bonus token, or the token of a node without an answer yet.
        num_verified: number of accepted nodes plus rejected children of the path's last node.
    """

    request: int
    accepted_ids: IntArray
    next_token: int
    num_verified: int = 0


class CommitKind(StrEnum):
    """Whether a node of the tree has the committed next token.

    ``HIT``: a node has it and becomes the root; its subtree survives. ``MISS``: no node has it, or
    ``DecodeState.first_alone`` applies; the tree is discarded and a new root is created.
    """

    HIT = "hit"
    MISS = "miss"


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """The state change of one request at the end of a step.

    Parts that store data per node find it by node id. They must ignore a second call with a commit
    of the same request and ``step``.

    Attributes:
        retired_ids: int64[D + 1], the old root and the accepted nodes in path order.
        retired_tokens: int64[D + 1], the tokens of these nodes.
        root_id: node id of the new root, whose token is ``next_token``; a fresh id on a miss.
        prefix_len: number of committed tokens before the new root.
        kept_ids: int64[M], sorted ids of the surviving nodes, including the new root.
        num_examined: number of submitted nodes other than the retired ones, which pruning examines.
        finished: the request is complete; ``close`` follows.
        hidden: name -> [D + 1, E], hidden states of the retired nodes if a part needs them; not
            sent to other processes.
    """

    request: int
    step: int
    kind: CommitKind
    retired_ids: IntArray
    retired_tokens: IntArray
    next_token: int
    root_id: int
    prefix_len: int
    kept_ids: IntArray
    num_examined: int = 0
    finished: bool = False
    hidden: Mapping[HiddenName, torch.Tensor] = field(default_factory=dict)

    @property
    def new_tokens(self) -> list[int]:
        """Returns the token that followed each retired node; the last one is ``next_token``."""
        return [*self.retired_tokens[1:].tolist(), self.next_token]

    def keeps(self, node_ids: IntArray) -> BoolArray:
        """Returns bool[W]: whether each of the nodes ``node_ids``, int64[W], survives."""
        if not len(self.kept_ids):
            return np.zeros(len(node_ids), np.bool_)
        kept: BoolArray = (
            self.kept_ids.take(self.kept_ids.searchsorted(node_ids), mode="clip") == node_ids
        )
        return kept


class NodeMap(Generic[Value]):
    """Stores a value per live node of open requests, by node id.

    A commit removes the values of all nodes that are not in its ``kept_ids``. Applying the same
    commit a second time removes nothing.
    """

    def __init__(self) -> None:
        self._values: dict[int, dict[int, Value]] = {}
        self._steps: dict[int, int] = {}

    def open(self, request_id: int) -> None:
        self._values[request_id] = {}
        self._steps[request_id] = -1

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._values

    def __getitem__(self, request_id: int) -> dict[int, Value]:
        return self._values[request_id]

    def update(self, request_id: int, node_ids: IntArray, values: Iterable[Value]) -> None:
        """Sets one value per node; does nothing if the request is not open."""
        if request_id in self._values:
            self._values[request_id].update(zip(node_ids.tolist(), values, strict=True))

    def get(self, nodes: Nodes) -> list[Value | None]:
        """Returns the values of nodes of open requests in packed order, None where missing."""
        return [self._values[r].get(i) for r, ids in nodes.items for i in ids.tolist()]

    def commit(self, commits: Sequence[Commit]) -> None:
        for commit in commits:
            if commit.step <= self._steps.get(commit.request, commit.step):
                continue
            self._steps[commit.request] = commit.step
            values = self._values[commit.request]
            for node_id in values.keys() - set(commit.kept_ids.tolist()):
                del values[node_id]

    def clear(self) -> None:
        for values in self._values.values():
            values.clear()

    def close(self, request_id: int) -> None:
        self._values.pop(request_id, None)
        self._steps.pop(request_id, None)
