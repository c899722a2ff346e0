"""Several exits of the target, one chosen for each token (PPSD, arXiv 2509.19368, B.3).

PPSD names this as future work; ``MultiExitSource`` has this project's rule for the choice. Preset
``eesd_multi`` verifies after drafting (EESD), ``ppsd_multi`` while drafting (PPSD).
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from specdec.device import on_host
from specdec.errors import UserError
from specdec.executors.early_exit import FirstStage
from specdec.executors.models import ModelPair
from specdec.parts.fields import Count, validated
from specdec.sources.early_exit import ExitSource
from specdec.state import DecodeState, RequestState
from specdec.types import BoolArray, Candidates, Commit, IntArray, NodeMap, Nodes, Output


class MultiExitSource(ExitSource):
    """Takes each token from the first exit that no later exit is expected to improve on.

    PPSD B.3 states no rule, so this project's is used. An exit's *saving* weighs its expected
    acceptance (``ExitChances``) against its depth: by PPSD's Eq. 6 in a pipeline (``ppsd_saving``),
    by Eq. 4 if drafts are verified afterwards (``eesd_saving``). The token is taken from the first
    exit whose saving, given its own confidence, no later exit is expected to exceed.

    With ``executor=early_exit`` a later exit is computed only if it is chosen, from the node's
    hidden state, so no layer runs twice. With ``executor=pipeline`` choosing a later exit means
    waiting until its candidates arrive. The choice depends on the exits' distributions and, unless
    candidates are sampled, on how often their best tokens were the target's so far. It never
    depends on sampled candidates, so rejection verifiers stay unbiased.

    Args:
        pair, make_first_stage, candidates, sample: see ``ExitSource``.
        further_exits: number of layers before each exit after the pair's own; None for one exit at
            twice its depth.
    """

    @validated
    def __init__(
        self,
        *,
        pair: ModelPair,
        make_first_stage: Callable[[Sequence[int]], FirstStage] | None = None,
        further_exits: Sequence[Count] | None = None,
        candidates: Count = 16,
        sample: bool = False,
    ) -> None:
        self._further_exits = further_exits
        super().__init__(
            pair=pair, make_first_stage=make_first_stage, candidates=candidates, sample=sample
        )
        self._num_layers = pair.num_layers
        self._tops: NodeMap[dict[int, tuple[int, float]]] = NodeMap()  # by exit: token, confidence
        self._chances: dict[int, ExitChances] = {}

    def _exit_layers(self, pair: ModelPair) -> tuple[int, ...]:
        first, last, further = pair.exit_layer, pair.num_layers - 1, self._further_exits
        others = [min(2 * first, last)] if further is None else list(further)
        layers = [first, *others]
        if not others or layers != sorted(set(layers)) or layers[-1] > last:
            raise UserError(
                f"source.further_exits={further} must rise from above model.exit_layer={first} to"
                f" at most {last}, the target's layers less one; for one exit use source=early_exit"
            )
        return tuple(layers)

    def open(self, request: RequestState) -> None:
        super().open(request)
        self._tops.open(request.id)
        self._chances[request.id] = ExitChances(len(self.layers))

    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        left, rows = nodes, np.arange(len(nodes))
        parts: list[Candidates] = []
        placed: list[IntArray] = []
        for at in range(len(self.layers)):
            answer = self._read(state, left, k, at)
            if self._first_stage is not None:
                self._note(at, left, answer)
            waits = self._prefers_later(state, left, at)
            taken = (answer.counts > 0) & ~waits
            if taken.any():
                parts.append(answer.take(np.flatnonzero(taken)))
                placed.append(rows[taken])
            left, rows = left.where(waits), rows[waits]
            if not len(left):
                break
        if not parts:
            return Candidates.empty(len(nodes))
        order, mask = np.concatenate(placed), np.zeros(len(nodes), np.bool_)
        mask[order] = True
        return Candidates.joined(parts).take(np.argsort(order)).spread(mask)

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        super().commit(commits, output)
        for exits in output.exits:
            nodes = Nodes(((exits.request, exits.node_ids),))
            self._note(self.layers.index(exits.layer), nodes, exits.candidates)
        for commit in commits:
            self._learn(commit)
        self._tops.commit(commits)

    def close(self, request_id: int) -> None:
        super().close(request_id)
        self._tops.close(request_id)
        self._chances.pop(request_id, None)

    def _note(self, at: int, nodes: Nodes, answer: Candidates) -> None:
        if answer.probs is None:
            best, sure = answer.tokens[:, 0], np.exp(answer.logprobs[:, 0])
        else:
            probs = on_host(answer.probs)
            best, sure = probs.argmax(axis=1), probs.max(axis=1)
        for request_id, ids, rows in nodes.packed():
            for row, node_id in enumerate(ids.tolist(), rows.start):
                if request_id in self._tops and answer.counts[row]:
                    tops = self._tops[request_id].setdefault(node_id, {})
                    tops[at] = int(best[row]), min(1.0, float(sure[row]))

    def _prefers_later(self, state: DecodeState, nodes: Nodes, at: int) -> BoolArray:
        """Returns bool[W]: for which nodes a later exit than ``at`` is expected to save more."""
        later_is_better = []
        for request_id, ids in nodes.items:
            tops, chances = self._tops[request_id], self._chances[request_id]
            tree = state.requests[request_id].tree
            reaches = np.exp(tree.scores[tree.slots(ids)]).tolist()
            for node_id, reach in zip(ids.tolist(), reaches, strict=True):
                top = tops.get(node_id, {}).get(at)
                if top is None:
                    later_is_better.append(False)
                    continue
                here, *later = [
                    self._saving(chances.expected(at, other, top[1]), other, reach)
                    for other in range(at, len(self.layers))
                ]
                later_is_better.append(max(later, default=here) > here)
        return np.array(later_is_better, np.bool_)

    def _saving(self, alpha: float, at: int, reach: float) -> float:
        if self._first_stage is None:
            return ppsd_saving(alpha, self.layers[at], self._num_layers)
        return eesd_saving(alpha, reach, self.layers[at], self._num_layers)

    def _learn(self, commit: Commit) -> None:
        tops, chances = self._tops[commit.request], self._chances[commit.request]
        decided = [*commit.retired_tokens[1:].tolist(), commit.next_token]
        for node_id, token in zip(commit.retired_ids.tolist(), decided, strict=True):
            top = tops.pop(node_id, None)
            if top is not None and not self.gives_probs:
                chances.learn(top, token)


_BINS = 4
_PRIOR_WEIGHT = 4.0  # weight of the prior, in tokens
_PRIOR_ERRORS_LEFT = 0.8  # assumed share of an exit's errors that the next exit makes too


class ExitChances:
    """Expected acceptance of each exit's best token, given the confidence of an earlier exit.

    The prior assumes that an exit is right as often as its confidence states, and that each later
    one makes four fifths of its errors. A few tokens outweigh these assumptions. Observations are
    counted by confidence, in ``_BINS`` equal bins.
    """

    def __init__(self, num_exits: int) -> None:
        self._right = np.zeros((num_exits, num_exits, _BINS))
        self._seen = np.zeros((num_exits, num_exits, _BINS))

    def expected(self, known: int, other: int, confidence: float) -> float:
        """Returns the expected acceptance of exit ``other``, given the confidence of ``known``.

        ``other`` is the same exit or a later one. The confidence is the probability of the best
        token of ``known`` under its distribution.
        """
        at = known, other, _bin(confidence)
        prior = 1.0 - (1.0 - confidence) * _PRIOR_ERRORS_LEFT ** (other - known)
        total = _PRIOR_WEIGHT + self._seen[at]
        return float((_PRIOR_WEIGHT * prior + self._right[at]) / total)

    def learn(self, tops: Mapping[int, tuple[int, float]], token: int) -> None:
        """Counts a decided token; ``tops`` maps an exit to its best token and confidence."""
        for known, (_, confidence) in tops.items():
            for other, (best, _) in tops.items():
                if other >= known:
                    at = known, other, _bin(confidence)
                    self._seen[at] += 1
                    self._right[at] += best == token


def _bin(confidence: float) -> int:
    return min(_BINS - 1, int(confidence * _BINS))


def ppsd_saving(alpha: float, exit_layer: int, num_layers: int) -> float:
    """Expected layers saved by a draft token of an exit in a pipeline: alpha (N - E).

    By PPSD's Eq. 6 a token costs E if accepted and N if not; plain decoding costs N. A rejection
    takes the same time for all exits, so a later exit costs more only for accepted tokens.
    """
    return alpha * (num_layers - exit_layer)


def eesd_saving(alpha: float, reach: float, exit_layer: int, num_layers: int) -> float:
    """Expected layers saved by a draft token that is verified afterwards: reach alpha N - E.

    By PPSD's Eq. 4 any draft token costs E layers, and an accepted one saves a target pass of N.
    ``reach`` is the probability that all draft tokens before it are accepted, and ``alpha`` that it
    is accepted if they are.
    """
    return reach * alpha * num_layers - exit_layer
