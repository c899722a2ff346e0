"""Sources that draft with exit heads of the target, and PPSD's speed-up formulas (2509.19368).

The letters of Eq. 4 and 6 are those of the paper: alpha is the probability that a draft token is
accepted if those before it were, gamma the number of draft tokens per pass, N the layers of the
target, E the layers before the exit. Costs are counted in layers; heads, transfers and the
controller cost nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from math import ceil
from typing import Any

import torch

from specdec.executors.early_exit import FirstStage
from specdec.executors.models import ModelPair
from specdec.metrics.speedup import SpeedupLaw
from specdec.models.exits import HeadWeights
from specdec.models.loading import DTYPES
from specdec.parts.fields import Count, validated
from specdec.sources.candidate_cache import CandidateCache
from specdec.sources.model_source import ModelSource
from specdec.state import DecodeState, RequestState
from specdec.types import Candidates, Commit, Needs, Nodes, Output


class ExitSource(ModelSource):
    """Base of sources that propose candidates of exit heads of the target itself.

    With ``executor=early_exit``, ``expand`` runs the target's first layers itself: the target
    verifies after drafting. With ``executor=pipeline`` a node gets candidates only once it is
    submitted and has passed the exit layer (``Output.exits``): the target verifies while drafting
    (PPSD 4.2).

    Args:
        make_first_stage: builds the target's first layers with heads after the given layers, shared
            with the executor; None if the executor returns the exits (a pipeline).
        candidates: maximum number of tokens per node and exit that a pipeline returns.
        sample: sample candidates and return their distribution, for rejection verifiers.

    Attributes:
        layers: number of layers before each exit, increasing; the first is ``pair.exit_layer``.
    """

    @validated
    def __init__(
        self,
        *,
        pair: ModelPair,
        make_first_stage: Callable[[Sequence[int]], FirstStage] | None = None,
        candidates: Count = 16,
        sample: bool = False,
    ) -> None:
        self.layers = self._exit_layers(pair)
        self._first_stage = None if make_first_stage is None else make_first_stage(self.layers)
        needs = Needs(real_nodes=True)
        if self._first_stage is None:
            needs = Needs(exits=candidates, further_exits=self.layers[1:], real_nodes=True)
        super().__init__(needs=needs, vocab_size=pair.vocab_size, sample=sample)
        if self._first_stage is not None:
            self.counters = self._first_stage.counters
        self._pair = pair
        self._books = [CandidateCache() for _ in self.layers]

    def _exit_layers(self, pair: ModelPair) -> tuple[int, ...]:
        return (pair.exit_layer,)

    @cached_property
    def pass_bytes(self) -> int:
        """Bytes of the first exit head, and of the layers before it if run by the source."""
        pair, layer = self._pair, self.layers[0]
        head = pair.artefact(HeadWeights, layer=layer)
        size = DTYPES[str(pair.dtype)].itemsize
        layers = pair.weight_bytes["target"] * pair.num_layers / (pair.num_layers + pair.head_cost)
        before = 0 if self._first_stage is None else round(layers * layer / pair.num_layers)
        return head.num_parameters * size + before

    def open(self, request: RequestState) -> None:
        for book in self._books:
            book.open(request.id)

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        for exits in output.exits:
            nodes = Nodes(((exits.request, exits.node_ids),))
            self._books[self.layers.index(exits.layer)].keep(nodes, exits.candidates)
            self.counters.rows += len(exits.node_ids)
        self.counters.passes += len({exits.layer for exits in output.exits})
        for book in self._books:
            book.commit(commits)

    def close(self, request_id: int) -> None:
        for book in self._books:
            book.close(request_id)

    def _read(self, state: DecodeState, nodes: Nodes, k: int, at: int = 0) -> Candidates:
        """Returns candidates of exit ``at`` (index); none for nodes that have not passed it."""
        if self._first_stage is None:
            return self._books[at].recall(nodes, k)
        known, logits = self._first_stage.logits(state, nodes, at)
        if not logits:
            return Candidates.empty(len(nodes))
        return self._candidates(state, nodes.where(known), torch.stack(logits), k).spread(known)


class EarlyExitSource(ExitSource):
    """Proposes the candidates of one exit head after the target's first layers (EESD, PPSD).

    The arguments are those of ``ExitSource``.
    """

    def speedup_law(self, policy: Any, latency: int) -> SpeedupLaw | None:
        """Returns PPSD's Eq. 6 in a pipeline of ``latency`` steps, Eq. 4 for chains, else None."""
        exit_layer, num_layers = self._pair.exit_layer, self._pair.num_layers
        if policy.follows_exits and latency > 1:
            law = ppsd_law(exit_layer, num_layers, latency)
            return replace(law, alpha="hit_rate") if policy.width > 1 else law
        gamma = policy.chain_length
        return None if gamma is None else eesd_law(gamma, exit_layer, num_layers)

    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        return self._read(state, nodes, k)


def eesd_law(gamma: int, exit_layer: int, num_layers: int) -> SpeedupLaw:
    """Returns PPSD's Eq. 4, for drafting with the first E layers and then verifying (EESD).

    E is ``exit_layer``, N ``num_layers``. A round has gamma passes through the first E layers. Then
    the last draft token passes these E layers, and all draft tokens pass the other N - E.
    """
    return SpeedupLaw(plain=num_layers, gamma=gamma, draft=exit_layer)


def ppsd_law(exit_layer: int, num_layers: int, num_stages: int | None = None) -> SpeedupLaw:
    """Returns PPSD's Eq. 6, for verifying while drafting in a pipeline.

    An accepted token costs E = ``exit_layer`` layers, a rejected one a pass through all ceil(N / E)
    stages, with the last one counted as a whole stage (N is ``num_layers``). With another
    ``num_stages``, for which the paper states no equation, an accepted token takes the ceil(E
    num_stages / N) steps to its exit, and a rejected one as many steps as there are stages.
    """
    stages = ceil(num_layers / exit_layer)
    if num_stages is None or num_stages == stages:
        rejected = stages * exit_layer
        return SpeedupLaw(plain=num_layers, accepted=exit_layer, rejected=rejected)
    steps = ceil(exit_layer * num_stages / num_layers)
    return SpeedupLaw(plain=num_stages, accepted=steps, rejected=num_stages)
