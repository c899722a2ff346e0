"""The data that the parts of a strategy exchange.

In the order of a decoding step: nodes chosen by the policy and candidates proposed by the source,
rows fed to the target, the target's answers, and the decisions made from them.

What the controller owns (trees, candidates, commits) is numpy: the arrays are small, and at these
sizes a numpy call costs a fifth of a torch call. Model values (logits, hidden states) are torch.

Shape letters: R requests, W nodes, K candidates per node, A answered nodes, D accepted nodes,
V vocabulary, T tokens, E hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from specdec.device import Probs, concatenate, on_host, select_rows

IntArray: TypeAlias = npt.NDArray[np.int64]
FloatArray: TypeAlias = npt.NDArray[np.float64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]

NO_NODE = -1
"""Parent id of a root, and the id or slot of a node that does not exist."""

# ---------------------------------------------------------------------- requirements of parts


class Lossless(StrEnum):
    """The guarantee of a verifier.

    ``TOKEN``: the output equals plain decoding with the same seed, token for token.
    ``DISTRIBUTION``: every token is distributed as under the target. ``LOSSY``: neither; results
    carry this label wherever they are printed.
    """

    TOKEN = "token"  # noqa: S105 - a label, not a secret
    DISTRIBUTION = "distribution"
    LOSSY = "lossy"


class HiddenName(NamedTuple):
    """Name of a hidden state of the target.

    Attributes:
        layer: the layer, from 0, that the state is the output of.
        normed: after the model's final norm, which is the input of the output head; exists for the
            last layer only. False: the residual stream, before any norm.
    """

    layer: int
    normed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Inputs that a source or verifier requires of other parts; checked at composition.

    Attributes:
        target_probs: the target's full processed distribution per answered node.
        draft_probs: the draft's full distribution per expanded node, with candidates sampled from
            it instead of taken from the top.
        target_draws: the target's own keyed draws (allowed under ``match`` only).
        hidden: hidden states of every row, prompt positions included: with its answer
            (``Answers.hidden``, ``Output.prompts``).
        early_hidden: hidden states of every row, as soon as the layer has computed them
            (``Output.early``), before its answer.
        exits: candidates per node in ``Output.exits``; 0: no exits needed.
        further_exits: layers of additional exits, deeper than the model's own
            (``model.exit_layer``).
        real_nodes: ``expand`` must receive nodes of the real trees, whose ids the executor has.
    """

    target_probs: bool = False
    draft_probs: bool = False
    target_draws: bool = False
    hidden: tuple[HiddenName, ...] = ()
    early_hidden: tuple[HiddenName, ...] = ()
    exits: int = 0
    further_exits: tuple[int, ...] = ()
    real_nodes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a model runs.

    Attributes:
        ranks: clock ranks of its devices, in the order of its layers; 0 is the controller. Where
            ranks are processes these are their numbers.
        weight_bytes: bytes of weights on each of them.
        stages: number of pipeline stages.
        degree: number of devices that share every layer (tensor parallelism).
    """

    ranks: tuple[int, ...]
    weight_bytes: tuple[int, ...]
    stages: int = 1
    degree: int = 1


@dataclass(frozen=True, kw_only=True)
class ExecutorPlan:
    """What is known of an executor before it is built; a class may add fields of its own.

    Attributes:
        latency, in_flight: see ``Executor``.
        placements: name of a model ("target", "draft", ...) -> where it runs.
    """

    latency: int | None
    in_flight: int
    placements: Mapping[str, Placement]

    @property
    def num_ranks(self) -> int:
        """Number of ranks besides the controller."""
        return max(rank for place in self.placements.values() for rank in place.ranks)

    @property
    def device_bytes(self) -> dict[int, int]:
        """Rank -> bytes of all weights on it."""
        total: dict[int, int] = {}
        for place in self.placements.values():
            for rank, size in zip(place.ranks, place.weight_bytes, strict=True):
                total[rank] = total.get(rank, 0) + size
        return dict(sorted(total.items()))


# ---------------------------------------------------------------------- nodes and candidates


@dataclass(frozen=True, slots=True)
class Nodes:
    """Nodes of one or more requests, in the order in which per-node results are packed.

    Attributes:
        items: (request id, node ids[W_r] int64) per request; a request appears at most once.
    """

    items: tuple[tuple[int, IntArray], ...] = ()

    def __len__(self) -> int:
        return sum(len(ids) for _, ids in self.items)

    def packed(self) -> Iterator[tuple[int, IntArray, slice]]:
        """(request id, node ids[W_r], slice of their rows in a packed result) per request."""
        start = 0
        for request_id, ids in self.items:
            stop = start + len(ids)
            yield request_id, ids, slice(start, stop)
            start = stop

    def where(self, mask: BoolArray) -> Nodes:
        """The nodes whose row is true in ``mask``, bool[W]; requests without any are dropped."""
        selected = [(request_id, ids[mask[rows]]) for request_id, ids, rows in self.packed()]
        return Nodes(tuple(item for item in selected if len(item[1])))


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Proposed children of W nodes, one row per node in the order of the ``Nodes``.

    Attributes:
        tokens: int64[W, K], most probable first, or in sampling order if sampled.
        logprobs: float64[W, K], log draft probability given the node (<= 0).
        counts: int64[W], valid entries per row; 0 if the source has no proposal (yet).
        probs: float64[W, V], the distribution that the candidates were sampled from; only if the
            verifier needs it.
        origins: int64[W, K], index of the source that proposed each candidate (0 is the only or
            main source); None if all are 0.
    """

    tokens: IntArray
    logprobs: FloatArray
    counts: IntArray
    probs: Probs | None = None
    origins: IntArray | None = None

    @staticmethod
    def empty(num_nodes: int, num_candidates: int = 1) -> Candidates:
        """``num_nodes`` rows of count 0."""
        shape = (num_nodes, num_candidates)
        return Candidates(
            tokens=np.zeros(shape, np.int64),
            logprobs=np.full(shape, -np.inf),
            counts=np.zeros(num_nodes, np.int64),
        )

    @staticmethod
    def joined(parts: Sequence[Candidates]) -> Candidates:
        """Concatenates rows; all parts have the same K, no origins, and all or none have probs."""
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
        """The rows with the indices ``rows``, int64[W], which may repeat."""
        return Candidates(
            tokens=self.tokens[rows],
            logprobs=self.logprobs[rows],
            counts=self.counts[rows],
            probs=None if self.probs is None else select_rows(self.probs, rows),
            origins=None if self.origins is None else self.origins[rows],
        )

    def spread(self, mask: BoolArray) -> Candidates:
        """Scatters the rows to the true entries of ``mask``, bool[W]; other rows get count 0.

        With ``probs``, a row of count 0 gets the uniform distribution.
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


@dataclass(slots=True, kw_only=True, eq=False)
class Ticket:
    """A draft pass in flight.

    Attributes:
        nodes: the nodes that it expands.
        due_s: time of the run's clock at which it ends; None where only polling tells.
    """

    nodes: Nodes
    due_s: float | None = None


class EventKind(StrEnum):
    """What can happen while a policy waits.

    ``TARGET``: ``Executor.collect`` would not wait. ``DRAFT``: a draft pass has ended, and its
    candidates are in the trees. ``EARLY``: exits or early hidden states have arrived.
    """

    TARGET = "target"
    DRAFT = "draft"
    EARLY = "early"


@dataclass(frozen=True, slots=True)
class Event:
    """Something that has happened; ``ticket``: the ended draft pass of a ``DRAFT`` event."""

    kind: EventKind
    ticket: Ticket | None = None


# ---------------------------------------------------------------------- rows fed to the target


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeRows:
    """Tree nodes of one request as rows of the target's forward, parents before children.

    Attributes:
        request: request id.
        prefix_len: committed tokens before the root at submission.
        node_ids: int64[W], stable ids.
        tokens: int64[W].
        parent_ids: int64[W]; ``NO_NODE`` for the root.
        depths: int64[W], below the root at submission; position = prefix_len + depth.
    """

    request: int
    prefix_len: int
    node_ids: IntArray
    tokens: IntArray
    parent_ids: IntArray
    depths: IntArray

    @property
    def positions(self) -> IntArray:
        """int64[W]: absolute positions, which no later commit changes."""
        return self.prefix_len + self.depths

    def keep(self, mask: BoolArray) -> TreeRows:
        """The rows where ``mask``, bool[W], is true (pruning in flight, SpecPipe Alg. 1)."""
        return TreeRows(
            request=self.request,
            prefix_len=self.prefix_len,
            node_ids=self.node_ids[mask],
            tokens=self.tokens[mask],
            parent_ids=self.parent_ids[mask],
            depths=self.depths[mask],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunk:
    """Prompt tokens ``start .. start + len(tokens)`` of one request, under a causal mask.

    Prefill covers all prompt tokens but the last, which is the first root.
    """

    request: int
    start: int
    tokens: IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows submitted to the target in one step; an empty batch is only a step tick.

    A request's prefill chunk and its first root may share a batch; the chunk comes first.
    """

    step: int
    trees: tuple[TreeRows, ...] = ()
    prefills: tuple[PrefillChunk, ...] = ()

    @property
    def num_nodes(self) -> int:
        """Tree nodes of all requests."""
        return sum(len(rows.node_ids) for rows in self.trees)

    @property
    def num_tokens(self) -> int:
        """Rows of the target's forward: tree nodes and prefill tokens."""
        return self.num_nodes + sum(len(chunk.tokens) for chunk in self.prefills)


# ---------------------------------------------------------------------- results of the target


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The target's next tokens after nodes of one request.

    Attributes:
        request: request id.
        node_ids: int64[A].
        tokens: int64[A], the target's own next token after each node, by its keyed draw.
        probs: float64[A, V], processed target distributions; only if a part needs them.
        hidden: name -> tensor[A, E] in the target's dtype, on its device or the host; only if a
            part needs them.
    """

    request: int
    node_ids: IntArray
    tokens: IntArray
    probs: Probs | None = None
    hidden: Mapping[HiddenName, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exits:
    """Proposals of one exit head for nodes of one request (PPSD Alg. 1, lines 13 and 29).

    Attributes:
        request: request id.
        node_ids: int64[W], nodes that have passed the exit layer.
        candidates: one row per node, in the same order.
        layer: number of target layers before the exit.
    """

    request: int
    node_ids: IntArray
    candidates: Candidates
    layer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptHidden:
    """Hidden states of all positions of a prefill chunk.

    Attributes:
        request: request id.
        start: position of the chunk's first token.
        hidden: name -> [T, E], in the target's dtype on its device.
    """

    request: int
    start: int
    hidden: Mapping[HiddenName, torch.Tensor]

    @property
    def last_position(self) -> int:
        """Position of the last row."""
        return self.start + len(next(iter(self.hidden.values()))) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyHidden:
    """Hidden states of nodes of one request that may not be answered yet.

    Attributes:
        request: request id.
        node_ids: int64[W], nodes that have passed the layers.
        hidden: name -> [W, E], in the target's dtype, on its device or the host.
    """

    request: int
    node_ids: IntArray
    hidden: Mapping[HiddenName, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The executor's results of one step.

    Attributes:
        step: the step that these results end.
        answers: answers that arrived in this step, of any earlier batch; a request may occur more
            than once.
        exits: proposals for nodes that passed an exit layer in this step, on any stage.
        prompts: hidden states of prefill chunks; only if a part needs them. ``Needs.hidden``
            arrive when the chunk leaves the target, ``Needs.early_hidden`` when it has passed the
            layer, as separate entries.
        early: ``Needs.early_hidden`` of nodes that passed the layer in this step.
    """

    step: int
    answers: tuple[Answers, ...] = ()
    exits: tuple[Exits, ...] = ()
    prompts: tuple[PromptHidden, ...] = ()
    early: tuple[EarlyHidden, ...] = ()


# ---------------------------------------------------------------------- decisions


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A verifier's decision for one request.

    Attributes:
        request: request id.
        accepted_ids: int64[D], accepted nodes below the root, a path from the root; all answered.
        next_token: the token after that path: correction or bonus token or, if only the root is
            answered (one level per step), the target's answer.
        num_verified: candidates that the target judged: the accepted ones, and the children of the
            last node on the path.
    """

    request: int
    accepted_ids: IntArray
    next_token: int
    num_verified: int = 0


class CommitKind(StrEnum):
    """Relation of the committed next token to the tree.

    ``HIT``: a node carries it and becomes the root; its subtree survives. ``MISS``: no node carries
    it; the tree is discarded and a new root is created.
    """

    HIT = "hit"
    MISS = "miss"


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """The state change of one request at the end of a step, sent to every holder of node state.

    Holders store different things (KV entries, candidates, tokens), so each maps the stable ids to
    its own slots. Idempotent by ``step``. Retired nodes, the old root first, extend the prefix.

    Attributes:
        request: request id.
        step: step at whose end the decision was made.
        kind: hit or miss.
        retired_ids: int64[D + 1], old root and accepted nodes in path order; their KV entries move
            into the prefix.
        retired_tokens: int64[D + 1], their tokens.
        next_token: token of the new root.
        root_id: node id of the new root; a fresh id on a miss.
        prefix_len: committed tokens before the new root.
        kept_ids: int64[M], sorted ids of the surviving nodes, the new root included.
        finished: the request is complete; ``close`` follows.
        hidden: name -> [D + 1, E], hidden states of the retired nodes; only if a part needs them.
            It is not sent to other processes.
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
    finished: bool = False
    hidden: Mapping[HiddenName, torch.Tensor] = field(default_factory=dict)

    @property
    def new_tokens(self) -> list[int]:
        """Tokens that followed each retired node: the accepted tokens, then the next token."""
        return [*self.retired_tokens[1:].tolist(), self.next_token]

    def keeps(self, node_ids: IntArray) -> BoolArray:
        """bool[W]: which of ``node_ids``, int64[W], survive."""
        if not len(self.kept_ids):
            return np.zeros(len(node_ids), np.bool_)
        at = np.minimum(np.searchsorted(self.kept_ids, node_ids), len(self.kept_ids) - 1)
        return self.kept_ids[at] == node_ids
