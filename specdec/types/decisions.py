"""Decisions of a verifier, and the commits that are made from them.

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
        accepted_ids: int64[D], the accepted path below the root; the target has answered all of it.
        next_token: the correction or bonus token or, if only the root is answered (one level per
            step), the target's answer.
        num_verified: number of draft tokens that were tested: the accepted ones, and the children
            of the last node on the path.
    """

    request: int
    accepted_ids: IntArray
    next_token: int
    num_verified: int = 0


class CommitKind(StrEnum):
    """Whether a node of the tree has the committed next token.

    ``HIT``: a node has it and becomes the root; its subtree survives. ``MISS``: no node has it; the
    tree is discarded and a new root is created.
    """

    HIT = "hit"
    MISS = "miss"


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """The state change of one request at the end of a step.

    It is sent to all parts that store data per node, each of which maps the stable ids to its own
    slots. Applying a commit of the same ``step`` again changes nothing.

    Attributes:
        retired_ids: int64[D + 1], the old root and the accepted nodes in path order, which become
            part of the prefix.
        retired_tokens: int64[D + 1].
        root_id: node id of the new root, whose token is ``next_token``; a fresh id on a miss.
        prefix_len: number of committed tokens before the new root.
        kept_ids: int64[M], sorted ids of the surviving nodes, including the new root.
        num_examined: number of submitted nodes, except the retired ones, that pruning examines.
        finished: the request is complete; ``close`` follows.
        hidden: name -> [D + 1, E], hidden states of the retired nodes, if a part needs them; not
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
        """Returns bool[W]: which of the nodes ``node_ids``, int64[W], survive."""
        if not len(self.kept_ids):
            return np.zeros(len(node_ids), np.bool_)
        kept: BoolArray = (
            self.kept_ids.take(self.kept_ids.searchsorted(node_ids), mode="clip") == node_ids
        )
        return kept
