"""Best-first trees: Algorithm 1 by brute force, in both forms, and where they stop."""

import numpy as np
import pytest

from specdec.policies import BestFirst

from .bench import (
    READY,
    TableSource,
    Until,
    best_first,
    children_of,
    new_request,
    new_state,
    run,
    score,
)
from .test_shapes import ROOT, chosen_contexts, select_once


@pytest.mark.parametrize(
    ("bs", "w", "d"), [(2, 1, 1), (8, 8, 3), (8, 2, 6), (16, 4, 4), (18, 1, 1), (12, 18, 2)]
)
def test_serial_best_first_is_algorithm_1(bs: int, w: int, d: int) -> None:
    """Against Alg. 1 over the whole vocabulary, where every child of an expansion is a node."""
    source = TableSource()
    chosen = select_once(BestFirst(bs=bs, w=w, d=d), source)
    assert sorted(chosen) == sorted(best_first(ROOT, bs, w, d))
    assert len(chosen) == bs
    assert len(source.calls) == d
    assert all(len(call[1]) <= w for call in source.calls)


@pytest.mark.parametrize(("children", "passes"), [(1, 7), (2, 3), (4, 2), (8, 1), (None, 1)])
def test_fewer_children_make_a_lone_root_grow_longer(children: int | None, passes: int) -> None:
    """Alg. 1, lines 13-15: 1 + 2 + 4 + 8 nodes, or eight at once: a round after a miss."""
    policy, source = BestFirst(bs=8, w=8, d=3, asynchronous=True, children=children), TableSource()
    chosen = select_once(policy, source)
    assert policy.expansions == {"between": passes, "beside": 0}
    assert source.widths == [children or 8] * passes
    assert sorted(chosen) == sorted(best_first(ROOT, 8, 8, passes, children))


def test_best_first_grows_until_bs_nodes_are_available() -> None:
    """Two candidates per node: one expansion does not give twelve nodes."""
    source = TableSource(table=lambda c: children_of(c)[:2])
    chosen = select_once(BestFirst(bs=12, w=2, d=1), source)
    assert len(chosen) == 12
    assert len(source.calls) == 4  # 1 + 2 + 4 + 4 + 4 nodes
    silent = TableSource(silent=lambda c: True)
    assert select_once(BestFirst(bs=12, w=2, d=3), silent) == [ROOT]
    assert len(silent.calls) == 1, "a source without an answer is not asked again at once"


@pytest.mark.parametrize("min_prob", [0.05, 0.1, 1.0])
def test_best_first_leaves_improbable_nodes_out(min_prob: float) -> None:
    source = TableSource()
    chosen = select_once(BestFirst(bs=16, w=4, d=5, min_prob=min_prob), source)
    probable = [c for c in best_first(ROOT, 16, 4, 5) if np.exp(score(c, ROOT)) >= min_prob]
    assert sorted(chosen) == sorted(probable)
    assert 1 <= len(chosen) < 16
    asked = [context for call in source.calls for contexts in call.values() for context in contexts]
    assert all(np.exp(score(context, ROOT)) >= min_prob for context in asked)


@pytest.mark.parametrize("min_mass", [0.0, 0.3, 0.6, 1.0])
def test_best_first_stops_when_its_leaves_are_too_improbable(min_mass: float) -> None:
    """Up to d expansions while the w best leaves have a total probability of min_mass (root: 1)."""
    source = TableSource()
    select_once(BestFirst(bs=4, w=3, d=6, min_mass=min_mass), source)
    assert len(source.calls) == probable_rounds(4, 3, min_mass, most=6)


@pytest.mark.parametrize("min_mass", [0.05, 0.3, 0.6, 1.0])
def test_asynchronous_best_first_drafts_while_its_leaves_are_probable(min_mass: float) -> None:
    """After a miss ``select`` does not stop at ``bs`` nodes; deeper ones could not be submitted."""
    source = TableSource()
    policy = BestFirst(bs=6, w=3, d=2, asynchronous=True, min_mass=min_mass)
    chosen = select_once(policy, source)
    rounds = max(1, probable_rounds(6, 3, min_mass, most=6))
    assert len(source.calls) == policy.expansions["between"] == rounds
    assert sorted(chosen) == sorted(best_first(ROOT, 6, 3, rounds))
    assert probable_rounds(6, 3, 0.05, most=6) == 6, "the least probable case meets the limit"


def test_a_tree_drafted_in_overlap_is_not_drafted_on_in_select() -> None:
    """What pays was drafted while the target ran: its leaves are improbable by now."""
    state, source = new_state(new_request(1, ROOT)), TableSource()
    policy = BestFirst(bs=4, w=3, d=6, asynchronous=True, min_mass=0.3)
    policy.overlap(state, source, READY)
    assert probable_rounds(4, 3, 0.3, most=6) < len(source.calls) == 6
    assert len(policy.select(state, source))
    assert len(source.calls) == 6


def probable_rounds(bs: int, w: int, min_mass: float, most: int) -> int:
    """Expansions of the w best leaves while these have a total probability of min_mass."""
    rounds, scores, expanded = 0, {ROOT: 0.0}, set()
    while rounds < most:
        leaves = sorted((c for c in scores if c not in expanded), key=lambda c: -scores[c])[:w]
        if sum(np.exp(scores[c]) for c in leaves) < min_mass:
            break
        rounds += 1
        expanded |= set(leaves)
        scores |= {(*c, t): scores[c] + p for c in leaves for t, p in children_of(c)[: max(bs, w)]}
    return rounds


def test_asynchronous_best_first_expands_in_overlap() -> None:
    """Alg. 1: select makes good what is missing; d expansions while the target runs, or until it
    is ready."""
    state, source = new_state(new_request(1, ROOT)), TableSource()
    policy = BestFirst(bs=8, w=4, d=3, asynchronous=True)
    first = policy.select(state, source)
    assert len(source.calls) == 1
    assert sorted(chosen_contexts(first, state)) == sorted(best_first(ROOT, 8, 4, 1))
    state.mark_submitted(first)
    policy.overlap(state, source, READY)
    assert len(source.calls) == 4
    assert not len(policy.select(state, source)), "answers are awaited"
    assert len(source.calls) == 4

    polls = iter([False, False, True])
    policy = BestFirst(bs=8, w=4, d=None, asynchronous=True)
    policy.overlap(state, source, Until(lambda: next(polls)))
    assert len(source.calls) == 6


def test_asynchronous_best_first_reuses_the_tree() -> None:
    """Hits on nodes drafted while the target ran spare draft rounds in select."""
    done = run(BestFirst(bs=4, w=4, d=3, asynchronous=True), latency=1, max_new_tokens=60)
    fed = [s for s in done.log if s.chosen]
    assert any(len(s.before) > 1 and s.calls == 0 for s in fed)
    assert all(s.calls >= 1 for s in fed if s.before == {s.root: False})
    *others, _, _ = done.overlaps  # at the end there is less to draft
    assert others == [3] * len(others)
