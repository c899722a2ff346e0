"""Proposals of an exit head of the target itself (EESD, PPSD).

Shape letters: W nodes, K candidates, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from specdec.interfaces import TokenSource, TreePolicy
from specdec.metrics.counters import SourceCounters
from specdec.metrics.speedup import SpeedupLaw
from specdec.models.exits import HeadWeights
from specdec.parts.fields import Count, validated
from specdec.sampling.candidates import candidates_of
from specdec.sampling.transform import SamplingTransform
from specdec.sources.candidate_cache import CandidateCache
from specdec.sources.exit_laws import law_of
from specdec.types import Candidates, Commit, Needs, Nodes, Output

if TYPE_CHECKING:
    from specdec.executors.early_exit import ExitFront
    from specdec.executors.models import ModelPair
    from specdec.state import DecodeState, RequestState


class EarlyExitSource(TokenSource):
    """Proposes the candidates of the target's first layers and an exit head.

    With ``executor=early_exit`` (``exit_front``) expanded nodes are computed at once: draft, then
    verify. With ``executor=pipeline`` proposals arrive with ``Output.exits`` once a submitted node
    has passed the exit layer; until then it has count 0: verify while drafting (PPSD 4.2).

    Attributes:
        gives_probs: whether candidates are sampled and returned with their distribution.
        counters: passes of the front and their rows; in a pipeline, passes of the head alone.
    """

    @validated
    def __init__(
        self,
        *,
        pair: ModelPair,
        exit_front: Callable[[Sequence[int]], ExitFront] | None = None,
        candidates: Count = 16,
        sample: bool = False,
    ) -> None:
        """Composes the source.

        Args:
            pair: the model pair.
            exit_front: builds the target's first layers with heads after the given layers, shared
                with the executor; None if the executor returns the exits (a pipeline).
            candidates: maximum tokens per node that a pipeline's exit stage returns.
            sample: sample candidates and return their distribution, for rejection verifiers.

        Raises:
            ValueError: fewer than one candidate.
            UserError: the pair has no early exit.
        """
        self._front = None if exit_front is None else exit_front((pair.exit_layer,))
        self.needs = Needs(exits=0 if self._front is not None else candidates, real_nodes=True)
        self.vocab_size: int | None = pair.vocab_size
        self.gives_probs = sample
        self.counters = SourceCounters() if self._front is None else self._front.counters
        self._pair = pair
        self._book = CandidateCache()

    @cached_property
    def pass_bytes(self) -> int:
        """Bytes of weights that one pass reads; in a pipeline those of the exit head alone."""
        return exit_pass_bytes(self._pair, with_layers=self._front is not None)

    def speedup_law(self, policy: TreePolicy, latency: int) -> SpeedupLaw | None:
        """PPSD's Eq. 4 or 6; see ``exit_laws.law_of``."""
        return law_of(policy, self._pair.exit_layer, self._pair.num_layers, latency)

    def open(self, request: RequestState) -> None:
        """Starts a request; the executor has the caches."""
        self._book.open(request.id)

    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        """Candidates of nodes that have passed the exit; count 0 for the others."""
        if self._front is None:
            return self._book.recall(nodes, k)
        return read_front(self._front, state, nodes, k, sample=self.gives_probs)

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        """Stores arrived exits and removes nodes that left the trees."""
        for exits in output.exits:
            self._book.keep(Nodes(((exits.request, exits.node_ids),)), exits.candidates)
            self.counters.rows += len(exits.node_ids)
        self.counters.passes += bool(output.exits)
        self._book.commit(commits)

    def close(self, request_id: int) -> None:
        """Removes a request."""
        self._book.close(request_id)


def exit_pass_bytes(pair: ModelPair, *, with_layers: bool) -> int:
    """Bytes of weights that a pass of the first exit head reads.

    Args:
        pair: the model pair.
        with_layers: include the layers before the exit.
    """
    head = pair.artefact(HeadWeights, layer=pair.exit_layer)
    size = getattr(torch, str(pair.dtype)).itemsize
    layers = pair.weight_bytes["target"] * pair.num_layers / (pair.num_layers + pair.head_cost)
    before = round(layers * pair.exit_layer / pair.num_layers) if with_layers else 0
    return head.num_parameters * size + before


def read_front(
    front: ExitFront, state: DecodeState, nodes: Nodes, k: int, *, at: int = 0, sample: bool
) -> Candidates:
    """Candidates of an exit computed on demand.

    Args:
        front: the target's first layers.
        state: the forest.
        nodes: W nodes.
        k: maximum candidates per node.
        at: index of the exit.
        sample: sample candidates and return their distribution.

    Returns:
        W rows; count 0 for nodes without logits.
    """
    known, logits = front.logits(state, nodes, at)
    parts, start = [], 0
    for request_id, ids in nodes.where(known).items:
        request = state.requests[request_id]
        slots = request.tree.slots(ids)
        transform = SamplingTransform(request.sampling)
        histories = None
        if transform.params.needs_history:
            histories = [request.path_tokens(slot) for slot in slots.tolist()]
        candidates = candidates_of(
            transform,
            torch.stack(logits[start : start + len(ids)]),
            k,
            histories,
            draws=state.draws if sample else None,
            request_id=request_id,
            positions=request.tree.positions[slots],
        )
        parts.append(candidates)
        start += len(ids)
    if not parts:
        return Candidates.empty(len(nodes))
    return Candidates.joined(parts).spread(known)
