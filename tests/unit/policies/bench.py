"""Brute force over the table model of ``specdec.testing.contracts``, and events of a target."""

from collections.abc import Callable
from typing import Any

from specdec.interfaces import Events
from specdec.testing.contracts import Context, Selection, TableSource, table_children, tree_contexts
from specdec.testing.contracts import run_policy as run
from tests.states import new_request, new_state

__all__ = [
    "READY",
    "Context",
    "Selection",
    "TableSource",
    "beam",
    "best_first",
    "children_of",
    "new_request",
    "new_state",
    "run",
    "score",
    "tree_contexts",
]
children_of = table_children


def score(context: Context, root: Context) -> float:
    """Cumulative log-probability of a context below a root."""
    return sum(dict(children_of(context[:i]))[context[i]] for i in range(len(root), len(context)))


def beam(root: Context, width: int, children: int, depth: int) -> list[list[Context]]:
    """Beam search from nothing: the levels below a root."""
    levels, level = [], [root]
    for _ in range(depth):
        pool = [(*c, t) for c in level for t, _ in children_of(c)[:children]]
        pool.sort(key=lambda c: -score(c, root))
        level = pool[:width]
        levels.append(level)
    return levels


def best_first(
    root: Context, bs: int, w: int, d: int, children: int | None = None
) -> list[Context]:
    """SwiftSpec Alg. 1: the ``bs`` best nodes after ``d`` expansions, of all children or some."""
    scores, expanded = {root: 0.0}, set()
    rounds = 0
    while rounds < d or len(scores) < bs:
        leaves = sorted((c for c in scores if c not in expanded), key=lambda c: -scores[c])[:w]
        for leaf in leaves:
            expanded.add(leaf)
            for token, logprob in children_of(leaf)[:children]:
                scores[(*leaf, token)] = scores[leaf] + logprob
        rounds += 1
    return sorted(scores, key=lambda c: -scores[c])[:bs]


class Until(Events):
    """Events of a target that is ready when ``ready`` says so; no pass runs free."""

    def __init__(self, ready: Callable[[], bool]) -> None:
        self.running = []
        self._ready = ready

    def ready(self) -> bool:
        return self._ready()

    def start(self, *given: Any, **keys: Any) -> Any:
        raise AssertionError("no pass runs free")

    next = next_draft = start


READY = Until(lambda: True)
