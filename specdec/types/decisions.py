"""Decisions of a verifier, and the commits made of them.

Shape letters: W nodes, D accepted nodes, M kept nodes, E hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import torch

from specdec.types.arrays import BoolArray, IntArray
from specdec.types.needs import HiddenName


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
        num_examined: submitted nodes besides the retired ones, which pruning in flight examines.
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
    num_examined: int = 0
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
        kept: BoolArray = (
            self.kept_ids.take(self.kept_ids.searchsorted(node_ids), mode="clip") == node_ids
        )
        return kept
