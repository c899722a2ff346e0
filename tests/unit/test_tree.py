"""TokenTree against a reference tree of plain Python objects."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.device import on_host
from specdec.policies.tree_growth import most_probable
from specdec.tree import TokenTree
from specdec.types import NO_NODE, Answers, Candidates, FloatArray, HiddenName, IntArray

LOGPROBS = [0.0, -0.25, -0.5, -0.5, -1.0, -2.0]  # exact in binary, with ties


@dataclass
class RefNode:
    """A node with a reference to its parent; everything else is computed by walking."""

    id: int
    token: int
    parent: RefNode | None
    position: int
    logprob: float
    origin: int = 0
    submitted_at: int = -1
    expanded: bool = False
    candidates: dict[int, tuple[int, float, int]] = field(default_factory=dict)
    answer: int = -1
    hidden: dict[HiddenName, int] = field(default_factory=dict)
    probs: dict[str, float] = field(default_factory=dict)  # of one token, by draft and target

    @property
    def path(self) -> list[RefNode]:
        return [*(self.parent.path if self.parent else []), self]

    @property
    def score(self) -> float:
        return sum(node.logprob for node in self.path[1:])


class RefTree:
    """Nodes in the order in which they were made."""

    def __init__(self, token: int, position: int) -> None:
        self.next_id = 0
        self.nodes: list[RefNode] = []
        self.reset(token, position)

    def reset(self, token: int, position: int) -> None:
        self.nodes = [RefNode(self.next_id, token, None, position, 0.0)]
        self.next_id += 1

    def append(self, parent: RefNode, token: int, logprob: float, origin: int = 0) -> None:
        self.nodes.append(
            RefNode(self.next_id, token, parent, parent.position + 1, logprob, origin)
        )
        self.next_id += 1

    def reroot(self, root: RefNode) -> None:
        self.nodes = [node for node in self.nodes if root in node.path]
        root.parent = None

    def slot(self, node: RefNode) -> int:
        return self.nodes.index(node)


def check_equal(tree: TokenTree, ref: RefTree) -> None:
    nodes = ref.nodes
    assert len(tree) == len(nodes)
    assert tree.ids.tolist() == [n.id for n in nodes]
    assert tree.root_id == nodes[0].id
    assert tree.tokens.tolist() == [n.token for n in nodes]
    assert tree.parents.tolist() == [
        NO_NODE if n.parent is None else ref.slot(n.parent) for n in nodes
    ]
    assert tree.positions.tolist() == [n.position for n in nodes]
    assert tree.depths.tolist() == [len(n.path) - 1 for n in nodes]
    assert tree.scores.tolist() == [n.score for n in nodes]  # exact: dyadic log-probabilities
    assert tree.logprobs[1:].tolist() == [n.logprob for n in nodes[1:]]
    assert tree.origins.tolist() == [n.origin for n in nodes]
    assert tree.submitted_at.tolist() == [n.submitted_at for n in nodes]
    assert tree.expanded.tolist() == [n.expanded for n in nodes]
    assert tree.answered.tolist() == [n.answer >= 0 for n in nodes]
    assert tree.answers.tolist() == [n.answer for n in nodes]
    hidden = {i: {name: int(row) for name, row in rows.items()} for i, rows in tree.hidden.items()}
    assert hidden == {n.id: n.hidden for n in nodes if n.hidden}
    for name, stored in {"draft": tree.draft_probs, "target": tree.target_probs}.items():
        given = {i: float(on_host(row)[0]) for i, row in stored.items()}
        assert given == {n.id: n.probs[name] for n in nodes if name in n.probs}
    for slot, node in enumerate(nodes):
        left = {
            column: (int(tree.candidate_tokens[slot, column]), float(logprob))
            for column, logprob in enumerate(tree.candidate_logprobs[slot])
            if logprob > -np.inf
        }
        assert left == {c: (t, lp) for c, (t, lp, _) in node.candidates.items()}


def check_questions(tree: TokenTree, ref: RefTree) -> None:
    nodes = ref.nodes
    paths = [{ref.slot(m) for m in n.path} for n in nodes]
    square = np.array([[j in path for j in range(len(nodes))] for path in paths])
    rows = np.arange(len(nodes))[::-2]  # neither square nor in slot order
    ids = [[m.id for m in reversed(nodes[row].path)] for row in rows]
    longest = max(map(len, ids))
    padded = [path + [NO_NODE] * (longest - len(path)) for path in ids]
    assert tree.paths(rows).T.tolist() == padded
    assert tree.paths(rows[:0]).shape == (1, 0)
    for slot, node in enumerate(nodes):
        assert tree.path(slot).tolist() == [ref.slot(m) for m in node.path]
        assert np.array_equal(tree.subtree(slot), square[:, slot])
        children = [i for i, n in enumerate(nodes) if n.parent is node]
        assert tree.children(slot).tolist() == children
        for child in children:
            first = min(c for c in children if nodes[c].token == nodes[child].token)
            assert tree.child(slot, nodes[child].token) == first
        assert tree.child(slot, 99) == NO_NODE
    ids = np.array([nodes[-1].id, nodes[0].id, ref.next_id, -5])
    assert tree.slots(ids).tolist() == [len(nodes) - 1, 0, NO_NODE, NO_NODE]
    assert len(tree.slots(ids[:0])) == 0
    cached = [n.id for n in nodes[len(nodes) // 2].path]  # a cache has all ancestors, or none
    missing = {j for i in rows for j in paths[i] if i == j or nodes[j].id not in cached}
    found = tree.with_missing_ancestors(rows, lambda ids: np.isin(ids, cached))
    assert found.tolist() == sorted(missing)
    path = nodes[-1].path
    common = set.intersection(*(set(node.hidden) for node in path))
    states = tree.hidden_rows(np.array([node.id for node in path]))
    assert {name: rows[:, 0].tolist() for name, rows in states.items()} == {
        name: [node.hidden[name] for node in path] for name in common
    }


def best_nodes(tree: TokenTree, scores: FloatArray, num: int) -> IntArray:
    """The ``num`` best nodes by ``scores``, candidates left out."""
    return most_probable(tree, scores, np.full(len(tree), -np.inf), num)


def check_best(tree: TokenTree, ref: RefTree, num: int) -> None:
    nodes = ref.nodes
    order = sorted(range(len(nodes)), key=lambda i: (-nodes[i].score, i))
    best = best_nodes(tree, tree.scores, num).tolist()
    assert best == sorted(order[:num])
    assert num == 0 or 0 in best
    assert all(ref.slot(nodes[i].parent) in best for i in best if nodes[i].parent is not None)

    waiting = [i for i in order if nodes[i].submitted_at < 0]
    unsubmitted = np.where(tree.submitted_at < 0, tree.scores, -np.inf)
    chosen = best_nodes(tree, unsubmitted, num).tolist()
    assert chosen == sorted(waiting[:num])


class Pair:
    """The tree under test and the reference, driven by the same random choices."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.tree = TokenTree(token=7, position=11)
        self.ref = RefTree(7, 11)

    def logprobs(self, *shape: int) -> np.ndarray:
        return self.rng.choice(LOGPROBS, size=shape)

    def append(self) -> None:
        num = int(self.rng.integers(1, 9))
        parents = self.rng.integers(0, len(self.tree), num)
        tokens, logprobs = self.rng.integers(0, 6, num), self.logprobs(num)
        origins = self.rng.integers(0, 2, num) if self.rng.random() < 0.3 else None
        slots = self.tree.append(parents, tokens, logprobs, origins)
        assert slots.tolist() == list(range(len(self.ref.nodes), len(self.ref.nodes) + num))
        for i in range(num):
            origin = 0 if origins is None else int(origins[i])
            parent = self.ref.nodes[parents[i]]
            self.ref.append(parent, int(tokens[i]), float(logprobs[i]), origin)

    def expand(self) -> None:
        num, k = int(self.rng.integers(1, 5)), int(self.rng.integers(1, 5))
        slots = self.rng.choice(len(self.tree), min(num, len(self.tree)), replace=False)
        before = int(self.rng.integers(0, 3))  # rows of another request in the same answer
        shape = (before + len(slots), k)
        candidates = Candidates(
            tokens=self.rng.integers(0, 50, shape),
            logprobs=self.logprobs(*shape),
            counts=self.rng.integers(0, k + 1, shape[0]),
            origins=self.rng.integers(0, 3, shape) if self.rng.random() < 0.3 else None,
            probs=self.rng.random((shape[0], 1)) if self.rng.random() < 0.5 else None,
        )
        self.tree.set_candidates(slots, candidates, slice(before, shape[0]))
        if drops := bool(self.rng.integers(2)):
            self.tree.drop_known_children(slots)
        for row, slot in enumerate(slots, start=before):
            node, count = self.ref.nodes[slot], int(candidates.counts[row])
            node.expanded = count > 0
            if candidates.probs is not None:
                node.probs["draft"] = float(candidates.probs[row, 0])
            known = {n.token for n in self.ref.nodes if n.parent is node and drops}
            node.candidates = {
                c: (
                    int(candidates.tokens[row, c]),
                    float(candidates.logprobs[row, c]),
                    0 if candidates.origins is None else int(candidates.origins[row, c]),
                )
                for c in range(count)
                if int(candidates.tokens[row, c]) not in known  # it is taken already
            }

    def take(self) -> None:
        pool = [(i, c) for i, n in enumerate(self.ref.nodes) for c in n.candidates]
        if not pool:
            return
        picked = [pool[i] for i in self.rng.permutation(len(pool))[: int(self.rng.integers(1, 6))]]
        slots, columns = np.array(picked).T
        self.tree.take(slots, columns)
        for slot, column in picked:
            token, logprob, origin = self.ref.nodes[slot].candidates.pop(column)
            self.ref.append(self.ref.nodes[slot], token, logprob, origin)

    def submit(self) -> None:
        unsubmitted = np.where(self.tree.submitted_at < 0, self.tree.scores, -np.inf)
        slots = best_nodes(self.tree, unsubmitted, int(self.rng.integers(1, 6)))
        step = int(self.rng.integers(0, 100))
        self.tree.submitted_at[slots] = step
        for slot in slots:
            node = self.ref.nodes[slot]
            node.submitted_at = step
            assert node.parent is None or node.parent.submitted_at >= 0

    def draw_ids(self) -> IntArray:
        """Ids of any nodes that ever were, and of one that never was, in any order."""
        num = int(self.rng.integers(0, self.ref.next_id + 2))
        return self.rng.permutation(self.ref.next_id + 1)[:num]

    def states(self, ids: IntArray) -> tuple[HiddenName, torch.Tensor]:
        """A name, and a state of one number for each id; live nodes of the reference get theirs."""
        name = HiddenName(int(self.rng.integers(2)), bool(self.rng.integers(2)))
        rows = self.rng.integers(0, 1000, len(ids))
        for node in self.ref.nodes:
            for row in rows[ids == node.id].tolist():
                node.hidden[name] = row
        return name, torch.from_numpy(rows)[:, None]

    def answer(self) -> None:
        ids = self.draw_ids()
        tokens = self.rng.integers(0, 50, len(ids))
        hidden = dict([self.states(ids)]) if self.rng.random() < 0.5 else {}
        probs = self.rng.random((len(ids), 1)) if self.rng.random() < 0.5 else None
        given = {"node_ids": ids, "tokens": tokens, "probs": probs}
        self.tree.set_answers(Answers(request=0, hidden=hidden, **given))
        for node in self.ref.nodes:
            for row in np.flatnonzero(ids == node.id).tolist():
                node.answer = int(tokens[row])
                if probs is not None:
                    node.probs["target"] = float(probs[row, 0])

    def early(self) -> None:
        ids = self.draw_ids()
        self.tree.set_hidden(ids, dict([self.states(ids)]))

    def copy(self) -> None:
        """Goes on with the copy; what happens to the original shows in neither."""
        given, self.tree = self.tree, self.tree.copy()
        given.append(np.array([0]), np.array([3]), np.array([-1.0]))
        given.set_answers(Answers(request=0, node_ids=given.ids.copy(), tokens=given.ids + 100))
        given.set_hidden(given.ids, {HiddenName(0): torch.zeros(len(given), 1)})
        given.candidate_logprobs[:] = -np.inf
        given.submitted_at[:] = 5
        given.expanded[:] = True
        given.reroot(len(given) - 1)

    def reroot(self) -> None:
        slot = int(self.rng.integers(0, len(self.tree)))
        self.tree.reroot(slot)
        self.ref.reroot(self.ref.nodes[slot])

    def reset(self) -> None:
        token, position = int(self.rng.integers(0, 9)), int(self.rng.integers(0, 99))
        assert self.tree.reset(token=token, position=position) == self.ref.next_id
        self.ref.reset(token, position)


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    steps=st.lists(
        st.sampled_from(
            ["append", "append", "expand", "expand", "take", "take", "submit", "reroot", "reset"]
            + ["answer", "early", "copy"]
        ),
        max_size=25,
    ),
)
def test_any_history_equals_the_reference(seed: int, steps: list[str]) -> None:
    """Random appends, expansions, takes, submissions, answers, copies, reroots and resets."""
    pair = Pair(np.random.default_rng(seed))
    for step in steps:
        getattr(pair, step)()
        check_equal(pair.tree, pair.ref)
    check_questions(pair.tree, pair.ref)
    for num in (0, 1, 3, 1000):
        check_best(pair.tree, pair.ref, num)


def test_trees_beyond_the_first_capacity_equal_the_reference() -> None:
    """Storage grows, and selections leave the small-array path (more than 256 values)."""
    pair = Pair(np.random.default_rng(3))
    for _ in range(70):
        pair.append()
        pair.expand()
    assert len(pair.tree) > 257
    check_equal(pair.tree, pair.ref)
    check_questions(pair.tree, pair.ref)
    for num in (1, 40, 300):
        check_best(pair.tree, pair.ref, num)
    pair.ref.reroot(pair.ref.nodes[1])
    pair.tree.reroot(1)
    check_equal(pair.tree, pair.ref)
