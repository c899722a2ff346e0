"""Block drafters: DFlash (arXiv 2602.06036) and DSpark (arXiv 2607.05147), as chains and as trees.

One pass of the drafter gives the marginals of the next M tokens (``specdec.models.block``), in
DSpark each given the token before it. ``policy=dflash`` drafts the most probable chain, as
published, ``policy=ddtree`` the most probable tree. Instead of DSpark's schedule of verified
lengths, ``source.confidence`` ends a draft where the confidence head expects a rejection.

Shape letters: W nodes, M draft tokens of a block, E hidden size of the drafter, U draft vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from specdec.clocks import CONTROLLER, Clock, Work
from specdec.clocks.meter import Meter
from specdec.device import to_host
from specdec.executors.models import ModelPair
from specdec.models.block import BlockRunner, Context, Kind
from specdec.parts.fields import Share, Text, validated
from specdec.sources.eagle import Features
from specdec.sources.model_source import ModelSource
from specdec.state import DecodeState, RequestState
from specdec.types import BoolArray, Candidates, Commit, FloatArray, IntArray, Needs, Nodes, Output


@dataclass(slots=True)
class _Draft:
    """One request's target features, their keys and values in the drafter, and the root's block.

    ``rows``, [M, E], are the drafter's outputs in that block; None until it is computed.
    """

    features: Features
    context: Context
    rows: Tensor | None = None


class BlockSource(ModelSource):
    """Proposes the tokens that a block drafter predicts; the first token of a block is the root.

    A node at depth d gets its candidates from row d of the root's block. When the root moves the
    next block is computed, from all features up to the new root; nodes that were expanded before
    keep the candidates of the older block. In a pipeline the root is the oldest node without an
    answer, so its features have arrived, and the tree is at most M deep below it. The prompt's
    features arrive after the first root was submitted, which is therefore submitted alone; with
    sampled candidates (rejection) every executor does this, so that all give the same output.

    Args:
        clock: the run's clock, which counts each request's block as one pass of the draft model.
        meter: measures the drafter's passes under the name "block".
        head: folder of a DFlash or DSpark drafter for the target; None: an untrained one.
        untrained: architecture of the untrained drafter.
        confidence: a node gets candidates only if the product of the confidence head's estimates
            along its path is at least this. 0 sets no limit.
        sample: sample candidates and return their distribution, for rejection verifiers.
    """

    @validated
    def __init__(
        self,
        *,
        pair: ModelPair,
        clock: Clock,
        meter: Meter,
        head: Text | None = None,
        untrained: Kind = "dflash",
        confidence: Share = 0.0,
        sample: bool = False,
    ) -> None:
        self._runner = runner = pair.artefact(
            BlockRunner, folder=head, untrained=untrained, meter=meter
        )
        self._clock = clock
        self._least = confidence if runner.has_confidence else 0.0
        if not runner.trained:
            self.caveat = "its block drafter is untrained (source.head names a folder of one)"
        needs = Needs(hidden=runner.names, real_nodes=True)
        super().__init__(needs=needs, vocab_size=runner.vocab_size, sample=sample, label="block")
        if runner.target_ids is not None:
            self._token_ids = to_host(runner.target_ids)
        self._drafts: dict[int, _Draft] = {}

    @property
    def pass_bytes(self) -> int:
        return self._runner.weight_bytes

    def open(self, request: RequestState) -> None:
        features = Features(self._runner.names)
        self._drafts[request.id] = _Draft(features, self._runner.new_context())

    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        requests = state.requests
        can = np.concatenate([self._can_expand(requests[i], ids) for i, ids in nodes.items])
        served = nodes.where(can)
        if not served.items:
            return Candidates.empty(len(nodes))
        places = [self._rows_of(requests[i], ids) for i, ids in served.items]
        depths, tokens = (np.concatenate(part) for part in zip(*places, strict=True))
        blocks = [self._drafts[i].rows for i, ids in served.items for _ in ids]

        def logits_of(rows: IntArray) -> Tensor:
            chosen = [cast(Tensor, blocks[row])[depths[row]] for row in rows]
            return self._runner.logits(torch.stack(chosen), torch.from_numpy(tokens[rows]))

        # Nodes of a depth, after the same token, have the same candidates.
        keys = [depths, tokens] if self._runner.conditional else [depths]
        return self._shared_candidates(state, served, keys, logits_of, k).spread(can)

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        for chunk in output.prompts:
            if (draft := self._drafts.get(chunk.request)) is not None:
                draft.features.add(chunk.hidden, chunk.start)
        for commit in commits:
            if (draft := self._drafts.get(commit.request)) is not None:
                draft.features.add(commit.hidden, commit.prefix_len - len(commit.retired_ids))
                draft.rows = None

    def close(self, request_id: int) -> None:
        self._drafts.pop(request_id, None)

    def _rows_of(self, request: RequestState, ids: IntArray) -> tuple[IntArray, IntArray]:
        """Returns (block row that predicts its children, token) of each node, int64[W] each."""
        tree = request.tree
        slots = tree.slots(ids)
        return tree.positions[slots] - tree.positions[0], tree.tokens[slots]

    def _can_expand(self, request: RequestState, ids: IntArray) -> BoolArray:
        """Returns bool[W]: which nodes can be expanded; computes the root's block if missing."""
        draft, root = self._drafts[request.id], request.prefix_len
        if not 0 < root <= draft.features.known or (self.gives_probs and not request.output):
            return np.zeros(len(ids), np.bool_)
        if draft.rows is None:
            self._clock.start(CONTROLLER)
            self._runner.read(draft.context, draft.features.rows(draft.context.length, root))
            draft.features.drop(root)
            draft.rows = self._runner.rows(draft.context, int(request.tree.tokens[0]))
            self._clock.charge(CONTROLLER, Work.DRAFT, len(draft.rows))
            self._count(len(draft.rows))
        can: BoolArray = self._rows_of(request, ids)[0] < self._runner.num_drafts
        if self._least > 0.0:
            can &= self._survival(request, ids) >= self._least
        return can

    def _survival(self, request: RequestState, ids: IntArray) -> FloatArray:
        """Returns float64[W]: product of the confidence estimates on the path to each node."""
        rows = self._drafts[request.id].rows
        assert rows is not None
        found = []
        for slot in request.tree.slots(ids):
            path = request.tree.path(slot)[: self._runner.num_drafts]
            before = torch.from_numpy(request.tree.tokens[path])
            found.append(float(self._runner.confidence(rows[: len(path)], before).prod()))
        return np.array(found)

    def _target_logits(self, logits: Tensor) -> Tensor:
        return self._runner.target_logits(logits)
