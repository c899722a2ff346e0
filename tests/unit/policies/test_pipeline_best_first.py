"""Best-first feeding of a pipeline: what a step is fed, against brute force from the table."""

import pytest

from experiments.reproduce.lab import Lab
from strategies.specpipe_bf import PipelineBestFirst

from .bench import READY, Context, TableSource, children_of, new_request, new_state, score
from .test_shapes import ROOT, chosen_contexts

WIDTH, CHILDREN = 5, 3


def after_one_step(passes: int, max_new_tokens: int) -> tuple[list[Context], set[Context]]:
    """Nodes submitted in the second step after a new root, and nodes expanded by the draft."""
    policy = PipelineBestFirst(width=WIDTH, children=CHILDREN, draft_passes=passes)
    state, source = new_state(new_request(1, ROOT, max_new_tokens)), TableSource()
    nodes = policy.select(state, source)
    assert [ids.tolist() for _, ids in nodes.items] == [[0]], "a fresh root goes alone"
    state.mark_submitted(nodes)
    policy.overlap(state, source, READY)
    chosen = chosen_contexts(policy.select(state, source), state)
    return chosen, {context for call in source.calls for context in call[1]}


@pytest.mark.parametrize(
    ("passes", "max_new_tokens"), [(1, 40), (2, 40), (3, 40), (3, 3), (4, 3), (6, 4)]
)
def test_a_step_is_fed_the_most_probable_nodes_of_any_level(
    passes: int, max_new_tokens: int
) -> None:
    """Near the end too, where the last level's candidates once took draft passes from the rest."""
    known, expanded = {ROOT}, set()
    for _ in range(passes):
        open_ = [c for c in known - expanded if len(c) < len(ROOT) + max_new_tokens]
        leaves = sorted(open_, key=lambda c: -score(c, ROOT))[:WIDTH]
        expanded |= set(leaves)
        known |= {(*c, token) for c in leaves for token, _ in children_of(c)[:CHILDREN]}
    best = sorted(known - {ROOT}, key=lambda c: -score(c, ROOT))[:WIDTH]
    chosen, asked = after_one_step(passes, max_new_tokens)
    assert set(chosen) == set(best)
    assert asked == expanded
    assert passes == 1 or len({len(context) for context in chosen}) > 1, "several levels at once"


@pytest.mark.slow
def test_it_needs_a_tenth_fewer_steps_than_whole_levels(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """The preset's stated gain on synthetic drafts with equal nodes per step (16 % on 16 x 128)."""
    small = ("clock=simulated", "model=synthetic", "data.limit=4", "max_new_tokens=64")
    lab = Lab(folder=tmp_path, quick=True)
    steps = {
        name: lab.run([*small, "executor.stages=8", f"strategy={name}"]).summary["steps_per_token"]
        for name in ("specpipe", "specpipe_bf")
    }
    assert steps["specpipe_bf"] < 0.9 * steps["specpipe"]
