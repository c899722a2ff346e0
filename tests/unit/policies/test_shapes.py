"""The trees themselves, level by level, against brute force from the table."""

import itertools

import numpy as np
import pytest

from specdec.policies import BestFirst, Chain, FixedWidth, Static
from specdec.types import Nodes

from .bench import (
    READY,
    Context,
    Selection,
    TableSource,
    beam,
    children_of,
    new_request,
    new_state,
    run,
    score,
)

ROOT = (1, 2, 3)
NUM_TOKENS = 50


def chosen_contexts(nodes: Nodes, state) -> list[Context]:
    ((request_id, ids),) = nodes.items
    request = state.requests[request_id]
    slots = request.tree.slots(ids).tolist()
    return [tuple(request.path_tokens(slot).tolist()) for slot in slots]


def select_once(policy, source=None, max_new_tokens: int = 40) -> list[Context]:
    """What a policy submits for a fresh root of an idle request."""
    state = new_state(new_request(1, ROOT, max_new_tokens))
    return chosen_contexts(policy.select(state, source or TableSource()), state)


def greedy_chain(context: Context, num: int, salt: int = 0) -> list[Context]:
    chain = []
    for _ in range(num):
        context = (*context, children_of(context, salt)[0][0])
        chain.append(context)
    return chain


# Chain and static.


@pytest.mark.parametrize("gamma", [1, 2, 7])
def test_chain_follows_the_first_candidates(gamma: int) -> None:
    source = TableSource()
    assert select_once(Chain(gamma=gamma), source) == [ROOT, *greedy_chain(ROOT, gamma)]
    assert source.widths == [1] * gamma
    assert len(select_once(Chain(gamma=gamma), max_new_tokens=2)) == 1 + min(gamma, 2)


def test_chain_extends_a_surviving_path() -> None:
    """Two unsubmitted nodes are left of a chain: two expansions make it four again."""
    state = new_state(new_request(1, ROOT))
    source, tree = TableSource(), state.requests[1].tree
    Chain(gamma=2).select(state, source)
    assert chosen_contexts(Chain(gamma=4).select(state, source), state) == [
        ROOT,
        *greedy_chain(ROOT, 4),
    ]
    assert source.widths == [1] * 4
    assert tree.parents.tolist() == [-1, 0, 1, 2, 3]


@pytest.mark.parametrize("branching", [(1,), (3, 2), (1, 1, 3, 1, 1, 1, 1, 1), (2, 3, 1, 2)])
def test_static_topology(branching: tuple[int, ...]) -> None:
    expected, level = [ROOT], [ROOT]
    for children in branching:
        level = [(*c, t) for c in level for t, _ in children_of(c)[:children]]
        expected += level
    source = TableSource()
    assert select_once(Static(branching=branching), source) == expected
    assert source.widths == list(branching)


def test_static_completes_a_surviving_tree() -> None:
    """Known nodes are not expanded again, and get the children that they lack."""
    state, source = new_state(new_request(1, ROOT)), TableSource()
    Static(branching=[3, 1]).select(state, source)  # expanded with three and one candidates
    chosen = chosen_contexts(Static(branching=[3, 1, 2]).select(state, source), state)
    fresh = select_once(Static(branching=[3, 1, 2]))
    assert set(chosen) == set(fresh)
    assert len(chosen) == len(fresh)
    assert source.widths == [3, 1, 2]


# Fixed width.


@pytest.mark.parametrize(("width", "children", "depth"), [(1, 1, 5), (6, 2, 4), (8, 20, 3)])
def test_serial_fixed_width_is_beam_search(width: int, children: int, depth: int) -> None:
    policy = FixedWidth(width=width, children=children, levels_per_step=None, depth=depth)
    source = TableSource()
    chosen = select_once(policy, source)
    levels = beam(ROOT, width, children, depth)
    assert chosen[0] == ROOT
    assert sorted(chosen[1:]) == sorted(itertools.chain(*levels))
    assert [len(c) for c in chosen] == sorted(len(c) for c in chosen), "breadth-first"
    assert source.widths == [children] * depth


def check_level(selection: Selection, width: int, children: int, levels: int = 1) -> bool:
    """One step of the pipelined form: the last level is the best of the bottom's children."""
    root, before, chosen = selection.root, selection.before, selection.chosen
    if not chosen:
        return False
    if chosen == [root]:
        assert list(before) == [root], "a root goes alone only when it is fresh"
        return False
    assert len({len(c) for c in chosen}) <= levels
    depth = max(len(c) for c in before)
    bottom = [c for c in before if len(c) == depth]
    if depth == NUM_TOKENS + 1 + 3 * selection.request:  # no token could follow
        assert not any(before[c] for c in bottom)
        return False
    assert all(before[c] for c in bottom)
    pool = [(*c, t) for c in bottom for t, _ in children_of(c)[:children]]
    pool.sort(key=lambda c: -score(c, root))
    new = [c for c in chosen if len(c) == depth + 1]
    assert sorted(new) == sorted(pool[:width])
    place = {c: i for i, c in enumerate(bottom)}
    assert [place[c[:-1]] for c in new] == sorted(place[c[:-1]] for c in new), "parents' order"
    return True


@pytest.mark.parametrize(("width", "children", "levels"), [(6, 4, 1), (4, 20, 1), (5, 3, 2)])
def test_pipelined_level_is_the_best_after_pruning(width: int, children: int, levels: int) -> None:
    """Each select equals brute force on what the pruning left, and drafts nothing itself."""
    policy = FixedWidth(width=width, children=children, levels_per_step=levels)
    log = run(policy, latency=4, num_requests=2, max_new_tokens=NUM_TOKENS).log
    formed = sum(check_level(selection, width, children, levels) for selection in log)
    assert formed > 30
    assert all(selection.calls == 0 for selection in log)


def test_partial_refill_costs_no_forward() -> None:
    """A prune leaves a shallower, expanded level: the next one comes from known candidates."""
    state, source = new_state(new_request(1, ROOT)), TableSource()
    request = state.requests[1]
    policy = FixedWidth(width=3, children=6)
    for step in range(4):
        state.step = step
        state.mark_submitted(policy.select(state, source))
        policy.overlap(state, source, READY)
    tree = request.tree
    has_child = np.isin(np.arange(len(tree)), tree.parents)
    barren = np.flatnonzero(tree.expanded & ~has_child & (tree.depths < tree.depths.max()))
    assert len(barren), "the beam dropped every child of an expanded node"
    slot = int(barren[0])
    expected = [token for token, _ in children_of(tuple(request.path_tokens(slot).tolist()))[:3]]
    tree.reroot(slot)
    num_calls = len(source.calls)
    nodes = policy.select(state, source)
    slots = tree.slots(nodes.items[0][1])
    assert tree.parents[slots].tolist() == [0, 0, 0]
    assert tree.tokens[slots].tolist() == expected
    state.mark_submitted(nodes)
    policy.overlap(state, source, READY)
    assert len(source.calls) == num_calls + 1, "the overlap expands the new level, not the root"


def test_a_root_is_drafted_during_its_prefill_once() -> None:
    state, source = new_state(new_request(1, ROOT)), TableSource()
    state.requests[1].prefill_sent = 0
    policy = FixedWidth(width=4, children=4, levels_per_step=2)
    for _ in range(3):
        assert not len(policy.select(state, source))
        policy.overlap(state, source, READY)
    assert source.calls == [{1: [ROOT]}]
    state.requests[1].prefill_sent = 2
    assert chosen_contexts(policy.select(state, source), state) == [ROOT]


def test_ties_fall_in_slot_order() -> None:
    """Equal candidates everywhere: the first parents and the first columns win, in both forms."""

    def flat(context: Context):
        return [(token, -1.0) for token in (9, 4, 7, 5)]

    policy = FixedWidth(width=3, children=4, levels_per_step=None, depth=2)
    assert select_once(policy, TableSource(table=flat)) == [
        ROOT,
        *((*ROOT, t) for t in (9, 4, 7)),
        *((*ROOT, 9, t) for t in (9, 4, 7)),
    ]
    chosen = select_once(BestFirst(bs=4, w=2, d=2), TableSource(table=flat))
    assert chosen == [ROOT, *((*ROOT, t) for t in (9, 4, 7))]
