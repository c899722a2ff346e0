"""The data that the parts of a strategy exchange.

Everything the controller owns (trees, candidates, commits) is numpy: the arrays are small, and
numpy calls cost a fifth of torch calls at these sizes. Model values (logits, hidden states) are
torch.

Shape letters: R requests, W nodes, K candidates per node, A answered nodes, V vocabulary, T tokens,
E hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from specdec.device import Probs, concatenate, on_host

IntArray: TypeAlias = npt.NDArray[np.int64]
FloatArray: TypeAlias = npt.NDArray[np.float64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]

NO_NODE = -1
"""Parent id of a root, and the id of a node that does not exist."""


class Lossless(StrEnum):
    """What a verifier promises about the output.

    ``TOKEN``: equal to plain decoding with the same seed, token for token. ``DISTRIBUTION``: every
    token is distributed as under the target. ``LOSSY``: neither; labelled wherever it is printed.
    """

    TOKEN = "token"  # noqa: S105 - a label, not a secret
    DISTRIBUTION = "distribution"
    LOSSY = "lossy"


class CommitKind(StrEnum):
    """How the token after the answered path relates to the tree.

    ``HIT``: a node of the tree carries it and becomes the root; its subtree survives.
    ``MISS``: no node carries it; the tree is discarded and a fresh root stands for it.
    ``NONE``: no answer for this request in this step (the workers' step tick).
    """

    HIT = "hit"
    MISS = "miss"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a part must be given by the others; checked when a strategy is composed.

    Attributes:
        target_probs: the target's whole processed distribution per answered node.
        draft_probs: the draft's whole distribution per expanded node, with candidates sampled from
            it instead of taken from the top.
        target_draws: the target's own keyed draws (allowed under ``match`` only).
        hidden_layers: target layers, from 0, whose output ``Output`` must carry for every row.
        exits: candidates per node that ``Output.exits`` must carry, after the exit; 0 for none.
        further_exits: layers of exits beside the model's own (``model.exit_layer``), deeper ones.
        real_nodes: to be asked about nodes of the real trees only, whose ids the executor knows.
    """

    target_probs: bool = False
    draft_probs: bool = False
    target_draws: bool = False
    hidden_layers: tuple[int, ...] = ()
    exits: int = 0
    further_exits: tuple[int, ...] = ()
    real_nodes: bool = False


@dataclass(frozen=True, slots=True)
class Nodes:
    """Nodes of one or many requests, in the order in which per-node results are packed.

    Attributes:
        items: (request id, node ids[W_r] int64) per request; a request appears at most once.
    """

    items: tuple[tuple[int, IntArray], ...] = ()

    def __len__(self) -> int:
        return sum(len(ids) for _, ids in self.items)

    def where(self, mask: BoolArray) -> Nodes:
        """The nodes of the rows that ``mask``, bool[W], marks; requests left with none go."""
        items, start = [], 0
        for request_id, ids in self.items:
            left = ids[mask[start : start + len(ids)]]
            start += len(ids)
            if len(left):
                items.append((request_id, left))
        return Nodes(tuple(items))


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Proposals for the children of W nodes, rows in the order of the ``Nodes`` they answer.

    Attributes:
        tokens: int64[W, K], best first, or in sampling order where they were sampled.
        logprobs: float64[W, K], log draft probability given the node (all <= 0).
        counts: int64[W], valid entries per row; 0 where the source has nothing (yet).
        probs: float64[W, V], the distribution that the candidates were sampled from; only where the
            verifier needs it.
        origins: int64[W, K], index of the source that proposed each candidate (0 the only or the
            main one); None where all are 0.
    """

    tokens: IntArray
    logprobs: FloatArray
    counts: IntArray
    probs: Probs | None = None
    origins: IntArray | None = None

    @staticmethod
    def empty(num_nodes: int, num_candidates: int = 1) -> Candidates:
        """Candidates of a source that has nothing to say about ``num_nodes`` nodes."""
        shape = (num_nodes, num_candidates)
        return Candidates(
            tokens=np.zeros(shape, np.int64),
            logprobs=np.full(shape, -np.inf),
            counts=np.zeros(num_nodes, np.int64),
        )

    @staticmethod
    def joined(parts: Sequence[Candidates]) -> Candidates:
        """Rows of all parts, in order; of equal K, all with distributions or none, no origins."""
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

    def spread(self, mask: BoolArray) -> Candidates:
        """Rows for more nodes: these in order where ``mask``, bool[W], is set; else count 0.

        A row without an answer has a uniform distribution, where there are distributions.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeRows:
    """Tree nodes of one request on their way through the target, parents before children.

    Attributes:
        request: request id.
        prefix_len: committed tokens before the root when the rows were submitted.
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
        """The rows where ``mask``[W] is true (pruning in flight, SpecPipe Alg. 1)."""
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
    """What one step feeds to the target. May be empty: then it is only the step tick.

    A request's prefill chunk and its first root may share a batch; the chunk comes first.
    """

    step: int
    trees: tuple[TreeRows, ...] = ()
    prefills: tuple[PrefillChunk, ...] = ()

    @property
    def num_nodes(self) -> int:
        """Tree nodes in the batch, over all requests."""
        return sum(len(rows.node_ids) for rows in self.trees)

    @property
    def num_tokens(self) -> int:
        """Rows of the target's pass: tree nodes and prefill tokens."""
        return self.num_nodes + sum(len(chunk.tokens) for chunk in self.prefills)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The target's answers for nodes of one request.

    Attributes:
        request: request id.
        node_ids: int64[A].
        tokens: int64[A], the target's own next token after each node, by its keyed draw.
        probs: float64[A, V], processed target distributions; only where declared as needed.
        hidden: layer -> tensor[A, E] in the target's dtype, on its device or the host; if needed.
    """

    request: int
    node_ids: IntArray
    tokens: IntArray
    probs: Probs | None = None
    hidden: Mapping[int, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exits:
    """What an exit head proposes for nodes of one request (PPSD Alg. 1, lines 13 and 29).

    Attributes:
        request: request id.
        node_ids: int64[W], nodes that have passed the exit layer.
        candidates: rows in their order.
        layer: layers of the target before the exit.
    """

    request: int
    node_ids: IntArray
    candidates: Candidates
    layer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What the executor hands back at the end of a step.

    Attributes:
        step: step whose end this is.
        answers: per request that was answered in this step.
        exits: proposals for nodes that reached the exit layer, on any stage, in this step.
        prompts: hidden states of prefill chunks that left the target; only where needed.
    """

    step: int
    answers: tuple[Answers, ...] = ()
    exits: tuple[Exits, ...] = ()
    prompts: tuple[PromptHidden, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A verifier's decision for one request.

    Attributes:
        request: request id.
        accepted_ids: int64[D], answered nodes below the root that are accepted, a path from it.
        next_token: the token after that path: correction, bonus or, in a level-per-step pipeline,
            the answer itself.
        num_verified: candidates that the target judged: accepted, or children of the last node.
    """

    request: int
    accepted_ids: IntArray
    next_token: int
    num_verified: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """What every holder of per-node state must do about one request after a step.

    Holders differ in what they hold, so each maps the stable ids to its own slots. Idempotent by
    ``step``. The retired nodes, the old root first, become the tail of the prefix.

    Attributes:
        request: request id.
        step: step at whose end this was decided.
        kind: hit, miss or none.
        retired_ids: int64[D + 1], old root and accepted nodes in path order; their KV entries move
            into the prefix.
        retired_tokens: int64[D + 1], their tokens (a source without a tree reads only these).
        next_token: token of the new root.
        root_id: node id of the new root, fresh on a miss.
        prefix_len: committed tokens before the new root.
        kept_ids: int64[M], sorted ids of the nodes that survive, the new root included.
        finished: the request is complete; ``close`` follows.
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

    def keeps(self, node_ids: IntArray) -> BoolArray:
        """bool[W]: which of ``node_ids``[W] survive."""
        if not len(self.kept_ids):
            return np.zeros(len(node_ids), np.bool_)
        at = np.minimum(np.searchsorted(self.kept_ids, node_ids), len(self.kept_ids) - 1)
        return self.kept_ids[at] == node_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptHidden:
    """Hidden states of a prefill chunk that has passed the target.

    Attributes:
        request: request id.
        start: position of the chunk's first token.
        layers: layer -> [T, E], in the target's dtype on its device.
    """

    request: int
    start: int
    layers: Mapping[int, torch.Tensor]

    @property
    def last_position(self) -> int:
        """Position of the last row."""
        return self.start + len(next(iter(self.layers.values()))) - 1
