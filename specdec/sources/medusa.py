"""Proposals of heads on the target's last hidden state (Medusa, arXiv 2401.10774, section 2.1).

The channel is ``Needs.hidden_layers``: the executor hands out the hidden states of every answered
row (``Answers.hidden``) and of the prompt (``Output.prompts``). Of them a request keeps one, that
of the last committed token before the root, at position t: the target itself has drawn the root,
token t + 1, from it, and head k guesses token t + 1 + k from it. So a node at position q gets its
candidates from head q - t, whatever its parent is: all nodes of a depth have the same ones (the
Cartesian product of section 2.1.2). A commit moves t to the last retired node; nodes that were
asked before keep the candidates of the older hidden state.

In a pipeline a prompt's hidden state leaves the last stage after its first root was submitted,
alone then. Where candidates are sampled (rejection) the first root always goes alone, so that the
output is the same on every executor.

Shape letters: W nodes, K candidates, V vocabulary, E hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from specdec.clocks import CONTROLLER, Clock, Work
from specdec.metrics.counters import SourceCounters
from specdec.models.medusa import MedusaHeads
from specdec.parts.fields import Count, validated
from specdec.sampling.candidates import candidates_of, picked
from specdec.sampling.transform import SamplingTransform
from specdec.types import Candidates, Commit, CommitKind, Needs, Nodes, Output

if TYPE_CHECKING:
    from specdec.clocks.meter import Meter
    from specdec.sources.pair import SourcePair
    from specdec.state import DecodeState, RequestState
    from specdec.types import IntArray


@dataclass(slots=True)
class _Last:
    """The hidden state that a request's heads read.

    Attributes:
        position: t.
        hidden: [E].
        logits: head -> [V], of heads that have been asked.
    """

    position: int
    hidden: torch.Tensor
    logits: dict[int, torch.Tensor] = field(default_factory=dict)


class MedusaSource:
    """What Medusa heads propose; no model and no cache of its own.

    A node has candidates once its request has a hidden state, as deep as there are heads.

    Attributes:
        gives_probs: whether candidates are sampled and come with their whole distribution.
        counters: passes of single heads, and the hidden states that they read.
    """

    @validated
    def __init__(
        self,
        *,
        pair: SourcePair,
        clock: Clock,
        meter: Meter,
        heads: Count = 4,
        sample: bool = False,
    ) -> None:
        """Loads the heads.

        Args:
            pair: the model pair.
            clock: charged one output head per pass of a head; the block's square matrix, E / V of
                an output head, is not charged.
            meter: counts the passes as "medusa".
            heads: number of heads, which is the number of tokens guessed after the root.
            sample: sample candidates and return their distribution, for rejection verifiers.

        Raises:
            ValueError: fewer than one head.
            UserError: the pair has no hidden states, or not as many trained heads.
        """
        self._heads = pair.artefact(MedusaHeads, num_heads=heads, meter=meter)
        self._clock = clock
        self.needs = Needs(hidden_layers=(self._heads.layer,), real_nodes=True)
        self.vocab_size: int | None = self._heads.vocab_size
        self.gives_probs = sample
        self.counters = SourceCounters()
        self._last: dict[int, _Last | None] = {}
        self._prompt_ends: dict[int, int] = {}  # positions before the first roots

    @property
    def pass_bytes(self) -> int:
        """Bytes of weights that one pass of a head reads."""
        return self._heads.head_bytes

    def open(self, request: RequestState) -> None:
        """Starts a request, which has no hidden state yet."""
        self._last[request.id] = None
        self._prompt_ends[request.id] = request.num_prefill - 1

    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        """Candidates by depth; count 0 below the last head and where no hidden state is known."""
        numbers = [self._numbers(state, request_id, ids) for request_id, ids in nodes.items]
        self._compute(nodes, numbers)
        parts = [
            self._proposed(state, request_id, ids[asked > 0], asked[asked > 0], k)
            for (request_id, ids), asked in zip(nodes.items, numbers, strict=True)
            if (asked > 0).any()
        ]
        if not parts:
            return Candidates.empty(len(nodes))
        return Candidates.joined(parts).spread(np.concatenate(numbers) > 0)

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        """Takes the hidden states of prompts and of the last retired nodes."""
        (layer,) = self.needs.hidden_layers
        for chunk in output.prompts:
            at_end = chunk.last_position == self._prompt_ends.get(chunk.request)
            if at_end and not self.gives_probs:
                hidden = chunk.layers[layer][-1].clone()  # the rest of the pass may go
                self._last[chunk.request] = _Last(chunk.last_position, hidden)
        answers = {found.request: found for found in output.answers}
        for commit in commits:
            if commit.kind is CommitKind.NONE:
                continue
            found = answers[commit.request]
            (row,) = np.flatnonzero(found.node_ids == commit.retired_ids[-1])
            hidden = found.hidden[layer][int(row)].clone()
            self._last[commit.request] = _Last(commit.prefix_len - 1, hidden)

    def close(self, request_id: int) -> None:
        """Forgets a request."""
        self._last.pop(request_id, None)
        self._prompt_ends.pop(request_id, None)

    def _numbers(self, state: DecodeState, request_id: int, ids: IntArray) -> IntArray:
        """int64[W]: the head that guesses each node's children, 0 where there is none."""
        last = self._last[request_id]
        if last is None:
            return np.zeros(len(ids), np.int64)
        tree = state.requests[request_id].tree
        ahead = tree.positions[tree.slots(ids)] - last.position
        return np.where((ahead >= 1) & (ahead <= self._heads.num_heads), ahead, 0)

    def _compute(self, nodes: Nodes, numbers: Sequence[IntArray]) -> None:
        """Runs the heads that are asked for the first time, each once for all requests."""
        wanted: dict[int, list[_Last]] = {}
        for (request_id, _), asked in zip(nodes.items, numbers, strict=True):
            last = self._last[request_id]
            for number in np.unique(asked[asked > 0]).tolist():
                if last is not None and number not in last.logits:
                    wanted.setdefault(number, []).append(last)
        for number, rows in sorted(wanted.items()):
            self._clock.start(CONTROLLER)
            logits = self._heads.logits(number, torch.stack([last.hidden for last in rows]))
            self._clock.charge(CONTROLLER, Work.HEAD, len(rows))
            self.counters.passes += 1
            self.counters.rows += len(rows)
            for last, row in zip(rows, logits, strict=True):
                last.logits[number] = row

    def _proposed(
        self, state: DecodeState, request_id: int, ids: IntArray, numbers: IntArray, k: int
    ) -> Candidates:
        """Candidates of nodes of one request that have a head; once per depth where they can be."""
        request, last = state.requests[request_id], self._last[request_id]
        assert last is not None, "a node without a hidden state has no head"
        transform = SamplingTransform(request.sampling)
        slots = request.tree.slots(ids)
        histories = None
        rows = np.arange(len(ids))
        if transform.params.needs_history:
            histories = [request.path_tokens(slot) for slot in slots.tolist()]
        else:  # one row per depth, handed out to all its nodes
            _, first, rows = np.unique(numbers, return_index=True, return_inverse=True)
            numbers, slots = numbers[first], slots[first]
        found = candidates_of(
            transform,
            torch.stack([last.logits[number] for number in numbers.tolist()]),
            k,
            histories,
            draws=state.draws if self.gives_probs else None,
            request_id=request_id,
            positions=request.tree.positions[slots],
        )
        return picked(found, rows)
