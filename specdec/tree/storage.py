"""Arrays of a token tree's nodes, by slot.

Shape letters: N nodes, K candidates, V vocabulary, E hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from typing import Self, TypeAlias

import numpy as np
import torch

from specdec.device import Probs
from specdec.types import NO_NODE, BoolArray, FloatArray, HiddenName, IntArray

_CAPACITY = 64  # nodes that a new tree has room for

_Located: TypeAlias = tuple[IntArray | None, IntArray | None]
"""Node ids, all of them in the tree, and their slots; None: of no nodes."""

NOWHERE: _Located = (None, None)


class StateRow(Mapping[HiddenName, torch.Tensor]):
    """One row of each of some states [W, E]; most rows are dropped before anything reads them."""

    def __init__(self, states: Mapping[HiddenName, torch.Tensor], row: int) -> None:
        self._states, self._row = states, row

    def __getitem__(self, name: HiddenName) -> torch.Tensor:
        return self._states[name][self._row]

    def __iter__(self) -> Iterator[HiddenName]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)


class NodeTable:
    """Arrays with one entry per node, and rows by node id; grows as needed.

    Attributes:
        draft_probs: node id -> float64[V], the distribution that the node's candidates were sampled
            from; only for sources that sample.
        target_probs: node id -> float64[V], the target's distribution after the node; only if a
            part needs it (``Needs.target_probs``).
        hidden: node id -> name -> [E], the target's hidden states of the node; only if a part needs
            them (``Needs.hidden``). Early ones are there before the node's answer.
    """

    def __init__(self, *, token: int, position: int, root_id: int = 0) -> None:
        """Creates a tree with only a root.

        Args:
            token: token of the root.
            position: its absolute position, which is the number of committed tokens before it.
            root_id: its id; later nodes get larger ones. Default: 0.
        """
        self._ints = np.zeros((8, _CAPACITY), np.int64)
        self._floats = np.zeros((2, _CAPACITY))
        self._flags = np.zeros((2, _CAPACITY), np.bool_)
        self._cand_tokens = np.zeros((_CAPACITY, 0), np.int64)
        self._cand_logprobs = np.zeros((_CAPACITY, 0))
        self._cand_origins = np.zeros((_CAPACITY, 0), np.int64)
        self._mixed = False  # whether any candidate had an origin; until then the table is all 0
        self.draft_probs: dict[int, Probs] = {}
        self.target_probs: dict[int, Probs] = {}
        self.hidden: dict[int, Mapping[HiddenName, torch.Tensor]] = {}
        self._next_id = root_id
        self._size = 0
        self._located: _Located = NOWHERE
        self.reset(token=token, position=position)

    def __len__(self) -> int:
        return self._size

    @property
    def ids(self) -> IntArray:
        """int64[N], increasing."""
        return self._ints[0, : self._size]

    @property
    def tokens(self) -> IntArray:
        """int64[N]."""
        return self._ints[1, : self._size]

    @property
    def parents(self) -> IntArray:
        """int64[N], parent slots, ``parents[i] < i``; ``NO_NODE`` at the root."""
        return self._ints[2, : self._size]

    @property
    def positions(self) -> IntArray:
        """int64[N], absolute positions."""
        return self._ints[3, : self._size]

    @property
    def submitted_at(self) -> IntArray:
        """int64[N], step of submission to the target; -1 if not submitted."""
        return self._ints[4, : self._size]

    @property
    def origins(self) -> IntArray:
        """int64[N], index of the source that proposed the node (``Candidates.origins``)."""
        return self._ints[5, : self._size]

    @property
    def answers(self) -> IntArray:
        """int64[N], the target's own next token after each node; -1 where not ``answered``."""
        return self._ints[6, : self._size]

    @property
    def logprobs(self) -> FloatArray:
        """float64[N], log draft probability given the parent."""
        return self._floats[0, : self._size]

    @property
    def scores(self) -> FloatArray:
        """float64[N], sum of ``logprobs`` along the path from the root."""
        return self._floats[1, : self._size]

    @property
    def expanded(self) -> BoolArray:
        """bool[N], whether the source has proposed candidates for the node."""
        return self._flags[0, : self._size]

    @property
    def answered(self) -> BoolArray:
        """bool[N], whether the target has answered the node."""
        return self._flags[1, : self._size]

    @property
    def root_submitted(self) -> bool:
        """Whether the root was submitted to the target."""
        return bool(self._ints[4, 0] >= 0)

    @property
    def root_answered(self) -> bool:
        """Whether the target has answered the root."""
        return bool(self._flags[1, 0])

    def may_reach(self, position: int) -> bool:
        """False where the tree is too small for a node at ``position``, as most trees are."""
        return int(self._ints[3, 0]) + self._size > position

    @property
    def depths(self) -> IntArray:
        """int64[N], below the root."""
        return self.positions - self._ints[3, 0]

    @property
    def candidate_tokens(self) -> IntArray:
        """int64[N, K]."""
        return self._cand_tokens[: self._size]

    @property
    def candidate_logprobs(self) -> FloatArray:
        """float64[N, K], -inf where there is no candidate or it became a node."""
        return self._cand_logprobs[: self._size]

    @property
    def next_id(self) -> int:
        """Id of the next new node."""
        return self._next_id

    @property
    def root_id(self) -> int:
        """Id of the root."""
        return int(self._ints[0, 0])

    def reset(self, *, token: int, position: int) -> int:
        """Discards all nodes and creates a new root; returns its id."""
        self._size = 0
        self._located = NOWHERE
        for rows in (self.draft_probs, self.target_probs, self.hidden):
            rows.clear()
        self._claim(1)
        self._ints[:, 0] = (self._next_id, token, NO_NODE, position, -1, 0, -1, NO_NODE)
        self._floats[:, 0] = 0.0
        self._flags[:, 0] = False
        self._cand_logprobs[0] = -np.inf
        self._next_id += 1
        return self.root_id

    def copy(self) -> Self:
        """An independent copy; rows of probabilities and hidden states are shared."""
        tree = copy(self)
        for name in (
            "_ints",
            "_floats",
            "_flags",
            "_cand_tokens",
            "_cand_logprobs",
            "_cand_origins",
        ):
            setattr(tree, name, getattr(self, name).copy())
        tree.draft_probs, tree.target_probs = dict(self.draft_probs), dict(self.target_probs)
        tree.hidden = dict(self.hidden)
        return tree

    def _claim(self, num: int) -> None:
        """Adds ``num`` uninitialised nodes, growing the arrays if needed."""
        need = self._size + num
        capacity = self._ints.shape[1]
        if need > capacity:
            extra = max(need, 2 * capacity) - capacity
            self._ints = np.pad(self._ints, ((0, 0), (0, extra)))
            self._floats = np.pad(self._floats, ((0, 0), (0, extra)))
            self._flags = np.pad(self._flags, ((0, 0), (0, extra)))
            self._cand_tokens = np.pad(self._cand_tokens, ((0, extra), (0, 0)))
            self._cand_logprobs = np.pad(self._cand_logprobs, ((0, extra), (0, 0)))
            self._cand_origins = np.pad(self._cand_origins, ((0, extra), (0, 0)))
        self._size = need

    def _widen(self, num: int) -> None:
        """Grows the candidate tables to ``num`` columns."""
        extra = num - self._cand_tokens.shape[1]
        if extra > 0:
            pad = ((0, 0), (0, extra))
            self._cand_tokens = np.pad(self._cand_tokens, pad)
            self._cand_logprobs = np.pad(self._cand_logprobs, pad, constant_values=-np.inf)
            self._cand_origins = np.pad(self._cand_origins, pad)
