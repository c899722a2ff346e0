"""``EagleSource``: its proposals, its cache and what late features do to them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch

from specdec.certify.laws import FALSE_ALARM, OPPOSED_TABLE, TARGET_TABLE
from specdec.certify.subject import decode_cases, decode_steps
from specdec.compose.workbench import Parts, Workbench
from specdec.errors import UserError
from specdec.interfaces import TreePolicy
from specdec.models.eagle import EagleHead
from specdec.policies import BestFirst, Chain, FixedWidth, Static
from specdec.sources import EagleSource, MixtureSource, RandomSource
from specdec.state import RequestState
from specdec.testing import TablePair
from specdec.verifiers import MatchVerifier, RejectionVerifier
from strategies.staged import StagedSource
from tests import eagle, toys
from tests.laws import least_p_value
from tests.proposals import check_proposals

pytestmark = pytest.mark.slow

K = 4  # candidates that are compared
CASES = toys.cases(12)[::2]  # one of each sampling


def source_of(bench: Workbench, *, early: bool = False, sample: bool = False) -> EagleSource:
    return EagleSource(
        pair=bench.pair, meter=bench.meter, early=early, sample=sample, prefill_chunk=5
    )


def built(
    head: EagleHead, policy: TreePolicy, stages: int | None = None, *, early: bool = False
) -> Parts:
    bench = Workbench(eagle.Pair(head), seed=toys.SEED)
    source = source_of(bench, early=early)
    return bench.parts(source=source, policy=policy, verifier=MatchVerifier(), stages=stages)


def levels() -> FixedWidth:
    return FixedWidth(width=4, children=3, levels_per_step=1, depth=None)


POLICIES: dict[str, tuple[Callable[[], TreePolicy], int | None]] = {
    "chain": (lambda: Chain(gamma=4), None),
    "best first": (lambda: BestFirst(bs=8, w=3, d=3), None),
    "static over stages": (lambda: Static(branching=[3, 2, 1]), 3),
    "levels over stages": (levels, 4),
}


# Proposals.


def reference(head: EagleHead, tokens: np.ndarray, depth: int) -> torch.Tensor:
    """[U]: logits after a path of ``depth`` nodes below the root, which end ``tokens``.

    Fresh passes over the whole sequence: features up to the root, the head's own output below.
    """
    ids = torch.from_numpy(tokens)[None]
    given = eagle.features(head, ids[:, : len(tokens) - depth - 1])
    states = head.states(given)
    for _ in range(depth + 1):
        num = states.shape[1]
        outputs = head(ids[:, 1 : num + 1], states, torch.arange(num)[None])
        states = torch.cat([states, head.fed_back(outputs[:, -1:])], 1)
    return head.logits(outputs[0, -1])


def compared(head: EagleHead, parts: Parts) -> list[int]:
    """Decodes the cases and compares every proposal; their number by depth."""

    def logits_of(request: RequestState, slot: int) -> torch.Tensor | None:
        if not request.prefix_len:
            return None
        return reference(head, request.path_tokens(slot), int(request.tree.depths[slot]))

    def decode() -> None:
        decode_cases(parts, CASES, batch_size=3, prefill_chunk=4)

    return check_proposals(parts, decode, logits_of, k=K, token_ids=head.target_ids)


@pytest.mark.parametrize(("version", "name"), [(1, "chain"), (3, "static over stages")])
def test_proposals_are_the_heads_on_features_and_its_own_outputs(
    version: Literal[1, 3], name: str
) -> None:
    policy, stages = POLICIES[name]
    head = eagle.trained_head(version)
    seen = compared(head, built(head, policy(), stages))
    assert min(seen[: 4 if name == "chain" else 3]) > 3, seen


def test_a_reduced_vocabulary_proposes_tokens_of_the_target() -> None:
    head = eagle.toy_head(3, vocabulary=20).requires_grad_(False)
    head.target_ids = torch.arange(20) * 2 + 1
    assert min(compared(head, built(head, Static(branching=[3, 2])))[:2]) > 5


# The cache.


def fresh_entries(head: EagleHead, tokens: np.ndarray) -> torch.Tensor:
    """[2, G, T - 1, D]: keys and values of the head's layer over ``tokens``, all from features."""
    ids = torch.from_numpy(tokens)[None]
    kept: list[torch.Tensor] = []

    def attend(layer: int, query: Any, key: Any, value: Any) -> Any:
        kept.append(torch.stack([key[0], value[0]]))
        return query.transpose(1, 2)

    states = head.states(eagle.features(head, ids[:, :-1]))
    head(ids[:, 1:], states, torch.arange(ids.shape[1] - 1)[None], attend)
    return kept[0]


def largest_error(head: EagleHead, parts: Parts) -> tuple[float, int]:
    """Decodes the cases; compares the final entries of every cache after every step.

    Returns:
        The largest difference, and the number of entries compared.
    """
    source, state = parts.source, parts.new_state()
    assert isinstance(source, EagleSource)
    outputs: dict[int, Any] = {}
    error, compared = 0.0, 0
    for _ in decode_steps(parts, CASES, outputs, batch_size=3, prefill_chunk=4, state=state):
        for request_id, draft in source._drafts.items():
            num = draft.true_len
            if num:
                tokens = state.requests[request_id].tokens[: num + 1]
                expected = fresh_entries(head, tokens)
                error = max(
                    error, float((draft.cache.storage[0, :, :, :num] - expected).abs().max())
                )
                compared += num
    toys.assert_plain(outputs, CASES)
    return error, compared


@pytest.mark.parametrize(
    ("name", "early"),
    [("best first", False), ("levels over stages", False), ("levels over stages", True)],
)
def test_committed_entries_are_those_of_the_targets_features(name: str, early: bool) -> None:
    """Also where nodes were drafted before their features arrived; outputs are plain decoding's."""
    policy, stages = POLICIES[name]
    head = eagle.trained_head(3)
    parts = built(head, policy(), stages, early=early)
    error, compared = largest_error(head, parts)
    assert error < 1e-9
    assert compared > 200
    assert parts.source.counters.catch_up_rows > 15


def test_early_features_correct_nodes_before_their_answers() -> None:
    """With early ones, nodes below answered parents are computed again; they propose no worse."""
    head = eagle.trained_head(3)
    rows = {}
    for early in (False, True):
        parts = built(head, levels(), 4, early=early)
        found = decode_cases(parts, CASES, batch_size=1)
        toys.assert_plain(found, CASES)
        rows[early] = parts.source.counters.catch_up_rows
    assert rows[True] > 1.5 * rows[False]


# Whole strategies.


def accepted(parts: Parts) -> int:
    """Accepted tokens over all cases; asserts that the output is plain decoding's."""
    found = decode_cases(parts, CASES, batch_size=2, prefill_chunk=3)
    toys.assert_plain(found, CASES)
    return sum(one.accepted for one in found.values())


def reading(head: EagleHead, layers: tuple[int, ...]) -> EagleHead:
    """The same weights on other layers of the target."""
    other = EagleHead(
        replace(head.config, layers=layers),
        embedding=head._target[0],
        output=head._target[1],
    ).double()
    other.load_state_dict(head.state_dict())
    return other.requires_grad_(False)


def test_wrong_layers_change_the_acceptance_and_not_the_output() -> None:
    head = eagle.trained_head(3)
    right = accepted(built(head, levels(), 4))
    assert right > 1.2 * accepted(built(reading(head, (2, 1, 0)), levels(), 4))


def test_nodes_of_other_sources_are_computed_level_by_level() -> None:
    """In a mixture the ancestors of a node may be another source's proposals."""
    head = eagle.trained_head(3)
    bench = Workbench(eagle.Pair(head), seed=toys.SEED)
    own = source_of(bench)
    source = MixtureSource(sources=[RandomSource(vocab_size=toys.VOCAB), own], confident=None)
    parts = bench.parts(source=source, policy=BestFirst(bs=8, w=3, d=3), verifier=MatchVerifier())
    assert accepted(parts) > 10


def test_what_does_not_fit_is_refused() -> None:
    bench = Workbench(eagle.Pair(eagle.trained_head(3)))
    with pytest.raises(ValueError, match="source=mixture"):
        StagedSource(draft=source_of(bench), cheap=RandomSource(vocab_size=toys.VOCAB))
    with pytest.raises(UserError, match="does not give"):
        bench.parts(source=source_of(bench), policy=Chain(gamma=2), verifier=RejectionVerifier())


def test_sampled_candidates_keep_the_law_of_the_target() -> None:
    bench = Workbench(TablePair(target=TARGET_TABLE, draft=OPPOSED_TABLE), seed=1)
    parts = bench.parts(
        source=source_of(bench, sample=True),
        policy=Static(branching=[3, 2]),
        verifier=RejectionVerifier(),
    )
    assert least_p_value(parts, 240) > FALSE_ALARM
