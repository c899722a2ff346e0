"""Medusa (Cai et al. 2024, arXiv 2401.10774): heads on the target's last hidden state.

Head k predicts the token k positions after the next one (2.1.1); the tree is the Cartesian product
of each head's best candidates (2.1.2). Deviations: there is no search for a sparser tree (2.3.3),
and the preset's verifier is ``match`` instead of typical acceptance.

Shape letters: N tree nodes, W selected nodes, V vocabulary, E hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

import numpy as np
import torch
from pydantic import Field

from specdec.clocks import CONTROLLER, Clock, Work
from specdec.clocks.meter import Meter
from specdec.device import on_host
from specdec.executors.models import ModelPair
from specdec.interfaces import Verifier
from specdec.models.medusa import MedusaHeads
from specdec.parts.fields import Count, Positive, PositiveShare, validated
from specdec.sampling.transform import SamplingParams, SamplingTransform
from specdec.sources.model_source import ModelSource
from specdec.state import DecodeState, RequestState
from specdec.tree import TokenTree
from specdec.types import (
    NO_NODE,
    BoolArray,
    Candidates,
    Commit,
    FloatArray,
    HiddenName,
    IntArray,
    Lossless,
    Needs,
    Nodes,
    Output,
    Verdict,
)
from specdec.verifiers.walk import follow_children


@dataclass(slots=True)
class _Last:
    """The hidden state [E] that the heads read for a request, and its ``position``.

    Attributes:
        logits: head number -> its logits [V]; only heads computed so far.
    """

    position: int
    hidden: torch.Tensor
    logits: dict[int, torch.Tensor] = field(default_factory=dict)


class MedusaSource(ModelSource):
    """Proposes the candidates of heads on the target's last hidden state (Medusa, section 2.1).

    The hidden state is that of the last committed token before the root, at position t. The target
    itself has sampled the root, token t + 1, from this state; head k predicts token t + 1 + k. So a
    node at position q gets its candidates from head q - t, whatever its parent: all nodes of a
    depth have the same ones. A commit moves t to the last retired node; nodes that were expanded
    before keep the candidates of the older hidden state.

    In a pipeline a prompt's hidden state leaves the last stage after the first root was submitted,
    which is therefore submitted alone. With sampled candidates (rejection) the first root is
    submitted alone on every executor, so that outputs are equal.

    Args:
        clock: counts a pass of a head as one output head of a model. The cost of the Medusa head's
            square matrix, E / V of an output head, is ignored.
        meter: measures the heads' passes under the name "medusa".
        heads: number of heads, which is the number of tokens predicted after the root.
        temperature: temperature of the heads' distributions, whose products rank the nodes; not
            used if candidates are sampled. Default: the request's temperature, or 1 if greedy.
        sample: sample candidates and return their distribution, for rejection verifiers.
    """

    @validated
    def __init__(
        self,
        *,
        pair: ModelPair,
        clock: Clock,
        meter: Meter,
        heads: Count = 4,
        temperature: Positive | None = None,
        sample: bool = False,
    ) -> None:
        self._heads = pair.artefact(MedusaHeads, num_heads=heads, meter=meter)
        self._clock, self._temperature = clock, temperature
        if not self._heads.trained:
            self.caveat = "its Medusa heads are untrained (model.exit_heads names a folder of them)"
        super().__init__(
            needs=Needs(hidden=(HiddenName(self._heads.layer),), real_nodes=True),
            vocab_size=self._heads.vocab_size,
            sample=sample,
        )
        self._last: dict[int, _Last] = {}  # of requests whose state has arrived
        self._prompt_ends: dict[int, int] = {}  # positions before the first roots

    @property
    def pass_bytes(self) -> int:
        return self._heads.head_bytes

    def open(self, request: RequestState) -> None:
        self._prompt_ends[request.id] = request.num_prefill - 1

    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        numbers = np.concatenate([self._numbers(state, i, ids) for i, ids in nodes.items])
        has_head = numbers > 0
        served, heads = nodes.where(has_head), numbers[has_head]
        if not served.items:
            return Candidates.empty(len(nodes))
        self._compute(served, heads)
        last = [self._last[i] for i, ids in served.items for _ in ids]

        def logits_of(rows: IntArray) -> torch.Tensor:
            return torch.stack([last[row].logits[int(heads[row])] for row in rows])

        # All nodes of a depth have the same candidates.
        return self._shared_candidates(state, served, [heads], logits_of, k).spread(has_head)

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        (name,) = self.needs.hidden
        for chunk in output.prompts:
            at_end = chunk.last_position == self._prompt_ends.get(chunk.request)
            if at_end and not self.gives_probs:
                hidden = chunk.hidden[name][-1].clone()  # so that the rest can be freed
                self._last[chunk.request] = _Last(chunk.last_position, hidden)
        for commit in commits:
            self._last[commit.request] = _Last(commit.prefix_len - 1, commit.hidden[name][-1])

    def close(self, request_id: int) -> None:
        self._last.pop(request_id, None)
        self._prompt_ends.pop(request_id, None)

    def _numbers(self, state: DecodeState, request_id: int, ids: IntArray) -> IntArray:
        """Returns int64[W]: the head that predicts each node's children; 0 for none."""
        last = self._last.get(request_id)
        if last is None:
            return np.zeros(len(ids), np.int64)
        tree = state.requests[request_id].tree
        ahead = tree.positions[tree.slots(ids)] - last.position
        return np.where((ahead >= 1) & (ahead <= self._heads.num_heads), ahead, 0)

    def _compute(self, nodes: Nodes, heads: IntArray) -> None:
        missing: dict[int, list[_Last]] = {}
        for request_id, _, rows in nodes.packed():
            last = self._last[request_id]
            for number in set(heads[rows].tolist()) - last.logits.keys():
                missing.setdefault(number, []).append(last)
        for number, lasts in sorted(missing.items()):
            self._clock.start(CONTROLLER)
            logits = self._heads.logits(number, torch.stack([last.hidden for last in lasts]))
            self._clock.charge(CONTROLLER, Work.HEAD, len(lasts))
            self._count(len(lasts))
            for last, row in zip(lasts, logits, strict=True):
                last.logits[number] = row

    def _transform(self, sampling: SamplingParams) -> SamplingTransform:
        if self._temperature is not None and not self.gives_probs:
            sampling = replace(sampling, temperature=self._temperature)
        return super()._transform(sampling)


@validated
@dataclass(eq=False, kw_only=True)
class TypicalVerifier(Verifier):
    """Typical acceptance (Medusa, Cai et al. 2024, section 2.3.1); lossy.

    A child is acceptable if target_probs(token) > min(epsilon, delta * exp(-entropy)). The longest
    path of acceptable nodes is accepted; among equally long ones, at each node the child with the
    higher target probability. The target's own token follows. For greedy requests the distribution
    is that at temperature 1: a one-hot one would turn the rule into ``match``.

    Args:
        epsilon: absolute threshold, above 0 and at most 1.
        delta: threshold relative to exp(-entropy), above 0; Medusa uses sqrt(epsilon).
    """

    needs = Needs(target_probs=True)
    lossless = Lossless.LOSSY

    epsilon: PositiveShare = 0.09
    delta: Annotated[float, Field(gt=0)] = 0.3

    def verify(self, state: DecodeState, requests: Sequence[RequestState]) -> list[Verdict]:
        return [self._follow(request) for request in requests]

    def _follow(self, request: RequestState) -> Verdict:
        tree = request.tree
        probs = self._acceptable(tree)
        heights = _heights(tree.parents, tree.depths, probs > 0.0)

        def choose(_tree: TokenTree, _slot: int, children: IntArray) -> int:
            best = np.lexsort((-probs[children], -heights[children]))
            best = best[probs[children[best]] > 0.0]
            return int(children[best[0]]) if len(best) else NO_NODE

        return follow_children(request, choose)

    def _acceptable(self, tree: TokenTree) -> FloatArray:
        """Returns float64[N]: target probability of the acceptable nodes, 0 elsewhere."""
        slots = np.flatnonzero(tree.answered)
        rows = np.full(len(tree), -1)
        rows[slots] = np.arange(len(slots))
        probs = np.stack([on_host(tree.target_probs[i]) for i in tree.ids[slots].tolist()])
        logs = np.log(probs, out=np.zeros_like(probs), where=probs > 0.0)
        entropy = -(probs * logs).sum(axis=1)
        threshold = np.minimum(self.epsilon, self.delta * np.exp(-entropy))
        above = np.where(tree.parents == NO_NODE, -1, rows[tree.parents])
        node_probs = np.where(above >= 0, probs[above, tree.tokens], 0.0)
        return np.where(node_probs > threshold[above], node_probs, 0.0)


def _heights(parents: IntArray, depths: IntArray, acceptable: BoolArray) -> IntArray:
    """Returns int64[N]: length of the longest path of acceptable nodes below each node."""
    heights = np.zeros(len(parents), np.int64)
    for depth in range(int(depths.max()), 0, -1):
        level = np.flatnonzero(acceptable & (depths == depth))
        np.maximum.at(heights, parents[level], heights[level] + 1)
    return heights
