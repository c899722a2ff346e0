"""Lossless rejection sampling on chains and trees. Shape letters: V vocabulary, C children."""

from collections.abc import Sequence
from functools import partial

import numpy as np

from specdec.device import Probs, SupportProbs, on_host
from specdec.interfaces import Verifier
from specdec.sampling.keyed_draws import KeyedDraws, Purpose
from specdec.sampling.transform import inverse_cdf
from specdec.state import DecodeState, RequestState
from specdec.types import NO_NODE, FloatArray, Lossless, Needs, Verdict
from specdec.verifiers.walk import Choice, follow


class RejectionVerifier(Verifier):
    """Accepts a sampled draft token with probability min(1, target_probs / draft_probs).

    Every emitted token is distributed as under the target. An *accepted token* is a draft token
    that passed its test. The *residual distribution* is norm(max(0, target - draft)). If all
    children of a node are rejected, the *correction token* is drawn from the residual distribution;
    if a node has no children, the *bonus token* is drawn from the target.

    On a chain this is Leviathan et al. 2023, Alg. 1 (Chen et al. 2023, Alg. 2); on a tree the
    multi-round form of SpecInfer (Miao et al. 2024, Alg. 2, verify_stochastic): children are tested
    one after the other, each against the residual distribution that the rejections before it leave.
    Siblings are drawn without replacement, so the draft distribution is renormalised without the
    earlier ones, as in recursive rejection sampling (Jeon et al. 2024, RSD) and Sequoia (Chen et
    al. 2024, Alg. 1).

    A node's children must be a prefix of its sampled candidates (asserted here) and be selected
    independently of their values (checked at composition). With a greedy target the output equals
    greedy decoding. Distributions become dense arrays only where the first child is rejected.
    """

    needs = Needs(target_probs=True, draft_probs=True)
    lossless = Lossless.DISTRIBUTION

    def verify(self, state: DecodeState, requests: Sequence[RequestState]) -> list[Verdict]:
        return [follow(request, partial(_judge, request, state.draws)) for request in requests]


def _judge(request: RequestState, draws: KeyedDraws, slot: int) -> Choice:
    tree = request.tree
    children = tree.children(slot)
    own_token = int(tree.answers[slot])
    if not len(children):
        return Choice(NO_NODE, own_token, 0)  # the bonus token: the target's own draw
    tokens = tree.tokens[children]
    assert (tokens == tree.candidate_tokens[slot, : len(children)]).all(), (
        "children must be taken in sampling order"
    )
    position = tree.positions[slot, None] + 1
    tests = draws.uniform(request.id, position, Purpose.ACCEPT, np.arange(len(children)))
    if request.sampling.greedy:
        accepted = np.flatnonzero(tokens == own_token)
        if len(accepted):
            return Choice(int(children[accepted[0]]), own_token, int(accepted[0]))
        return Choice(NO_NODE, own_token, len(children))
    node_id, first = int(tree.ids[slot]), int(tokens[0])
    drafted, answered = tree.draft_probs[node_id], tree.target_probs[node_id]
    probability = _prob_of(answered, first)
    if tests[0] * _prob_of(drafted, first) < probability:
        return Choice(int(children[0]), first, 0)  # without the rest of the rows
    draft, target = on_host(drafted), on_host(answered)
    size = max(len(draft), len(target))  # vocabularies are padded to different lengths
    draft, target = (np.pad(row, (0, size - len(row))) for row in (draft, target))
    for judged, (child, token) in enumerate(zip(children.tolist(), tokens.tolist(), strict=True)):
        if judged:
            draft = _without(draft, int(tokens[judged - 1]))
        target_prob = target[token]
        if tests[judged] * draft[token] < target_prob:
            return Choice(child, token, judged)
        target = _residual(target, draft)
    draw = draws.uniform(request.id, position, Purpose.RESIDUAL)
    return Choice(NO_NODE, int(inverse_cdf(target[None], draw)[0]), len(children))


def _prob_of(probs: Probs, token: int) -> float:
    """Returns the probability of a token in one row; 0 beyond the row's vocabulary."""
    if isinstance(probs, SupportProbs):
        return float(probs.values[probs.ids == token].sum())
    row = on_host(probs)
    return float(row[token]) if token < len(row) else 0.0


def _without(draft: FloatArray, token: int) -> FloatArray:
    draft = draft.copy()
    draft[token] = 0.0
    return draft / draft.sum()


def _residual(target: FloatArray, draft: FloatArray) -> FloatArray:
    """Returns norm(max(0, target - draft)), float64[V] (Leviathan et al. 2023, Alg. 1)."""
    rest = np.maximum(target - draft, 0.0)
    mass = rest.sum()
    # Mass 0: target and draft are equal up to rounding, so a rejection has probability ~1e-16.
    return rest / mass if mass > 0.0 else target
