"""``BestOfBeam`` against EAGLE-2's two phases, written down from the table without trees."""

import pytest

from specdec.policies import BestOfBeam

from .bench import Context, TableSource, children_of, score
from .test_shapes import ROOT, select_once


def two_phases(root: Context, nodes: int, width: int, children: int, depth: int) -> set[Context]:
    """EAGLE-2, section 4: expansion by a beam, then the best of all candidates."""
    found: list[Context] = []
    level = [root]
    for _ in range(depth + 1):
        below = [(*at, token) for at in level for token, _ in children_of(at)[:children]]
        found += below
        level = sorted(below, key=lambda c: -score(c, root))[:width]
    return {root, *sorted(found, key=lambda c: -score(c, root))[: nodes - 1]}


@pytest.mark.parametrize(
    ("nodes", "width", "children", "depth"),
    [(60, 10, 10, 7), (8, 3, 4, 3), (20, 2, 3, 5), (5, 4, 10, 1)],
)
def test_the_tree_is_that_of_the_two_phases(
    nodes: int, width: int, children: int, depth: int
) -> None:
    source = TableSource()
    policy = BestOfBeam(nodes=nodes, width=width, children=children, depth=depth)
    found = select_once(policy, source)
    assert set(found) == two_phases(ROOT, nodes, width, children, depth)
    assert len(found) == min(nodes, 1 + children + depth * width * children)
    at = {context: row for row, context in enumerate(found)}
    assert all(c == ROOT or at[c[:-1]] < at[c] for c in found), "parents first"
    widths = [len(contexts) for call in source.calls for contexts in call.values()]
    assert widths == [1] + [min(width, children)] + [width] * (depth - 1)


def test_nothing_is_drafted_beyond_the_last_token() -> None:
    """Two tokens can be emitted: the root's children and theirs, which are not expanded."""
    source = TableSource()
    policy = BestOfBeam(nodes=30, width=3, children=3, depth=5)
    found = select_once(policy, source, max_new_tokens=2)
    assert max(map(len, found)) == len(ROOT) + 2
    assert len(source.calls) == 2
