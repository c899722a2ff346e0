"""Complete best-first trees (``d="complete"``, DDTree) against a heap over the infinite tree."""

import heapq

import numpy as np
import pytest

from specdec.policies import BestFirst

from .bench import Context, TableSource, children_of
from .test_shapes import ROOT, select_once

HEADS = 4
_RNG = np.random.default_rng(5)
MARGINALS = [
    sorted(enumerate(np.log(_RNG.dirichlet(np.full(20, 0.3)))), key=lambda c: -c[1])
    for _ in range(HEADS)
]


def parallel(context: Context) -> list[tuple[int, float]]:
    """Marginals of the depth alone, as Medusa heads give them; nothing below the last head."""
    depth = len(context) - len(ROOT)
    return MARGINALS[depth] if depth < HEADS else []


def by_heap(table, num: int) -> list[Context]:
    """DDTree: pops the most probable node, pushes its first child and its next sibling."""
    nodes, heap = [], [(0.0, ROOT, ())]
    while heap and len(nodes) < num:
        negative, node, siblings = heapq.heappop(heap)
        nodes.append(node)
        if siblings:  # the rest of the parent's children
            (token, logprob), *rest = siblings
            parent = negative + dict(table(node[:-1]))[node[-1]]
            heapq.heappush(heap, (parent - logprob, (*node[:-1], token), tuple(rest)))
        if children := table(node):
            (token, logprob), *rest = children
            heapq.heappush(heap, (negative - logprob, (*node, token), tuple(rest)))
    return nodes


def mass(nodes: list[Context], table) -> float:
    """Expected number of accepted tokens if the marginals are the target's."""
    return sum(
        float(np.exp(sum(dict(table(n[:i]))[n[i]] for i in range(len(ROOT), len(n)))))
        for n in nodes
    )


@pytest.mark.parametrize("bs", [2, 16, 64])
@pytest.mark.parametrize("table", [parallel, children_of])
def test_the_tree_is_the_best_of_all(bs, table):
    source = TableSource(table=table)
    chosen = select_once(BestFirst(bs=bs, w=bs, d="complete"), source)
    assert sorted(chosen) == sorted(by_heap(table, bs))


def test_a_call_of_the_source_per_level_is_enough():
    source = TableSource(table=parallel)
    select_once(BestFirst(bs=64, w=64, d="complete"), source)
    assert len(source.calls) <= HEADS + 1  # the last one finds that there is no further head
    assert all(len(contexts) <= 64 for call in source.calls for contexts in call.values())


def test_improbable_nodes_are_neither_expanded_nor_submitted():
    source = TableSource(table=parallel)
    chosen = select_once(BestFirst(bs=64, w=64, d="complete", min_prob=0.05), source)
    probable = [n for n in by_heap(parallel, 64) if mass([n], parallel) >= 0.05]
    assert sorted(chosen) == sorted(probable)


def test_complete_trees_are_drafted_before_they_are_submitted():
    with pytest.raises(ValueError, match=r"policy\.asynchronous=false"):
        BestFirst(bs=4, w=4, d="complete", asynchronous=True)
