"""Hidden states that executors hand out, against fresh forwards of transformers' own model."""

import pytest
import torch
from heads import LAYERS, VOCAB, Pair, cases, levels, states, steps

from specdec.compose.workbench import Parts, Workbench
from specdec.executors import stage
from specdec.executors.stage import InFlight
from specdec.interfaces import TreePolicy
from specdec.policies import Static
from specdec.sources import (
    RandomSource,
)
from specdec.types import HiddenName, Needs, Output
from specdec.verifiers import MatchVerifier

TOLERANCE = 1e-9  # float64; only the order of summation differs from a fresh forward


@pytest.fixture(scope="module")
def models() -> Pair:
    return Pair()


def check_delivery(models: Pair, parts: Parts) -> tuple[int, int, set[int]]:
    """Holds every hidden state that leaves the executor against a fresh forward.

    Returns:
        Tree rows and prompt rows compared, and the steps from a node's submission to its early
        state, as often as there are such states.
    """
    state, collect = parts.new_state(), parts.executor.collect
    names, compared, delays = parts.executor.hidden, [0, 0], set[int]()

    def same(given: torch.Tensor, fresh: torch.Tensor) -> None:
        assert given.shape == fresh.shape
        assert (given - fresh).abs().max() < TOLERANCE

    def checked(*, wait: bool = True) -> Output:
        output = collect(wait=wait)
        for answers in output.answers:
            request = state.requests[answers.request]
            assert set(answers.hidden) == set(names)
            for row, slot in enumerate(request.tree.slots(answers.node_ids).tolist()):
                fresh = states(models, request.path_tokens(slot))
                for name in names:
                    same(answers.hidden[name][row], fresh[name.layer][-1])
                compared[0] += 1
        for early in output.early:
            request = state.requests[early.request]
            for row, slot in enumerate(request.tree.slots(early.node_ids).tolist()):
                fresh = states(models, request.path_tokens(slot))
                for name, given in early.hidden.items():
                    same(given[row], fresh[name.layer][-1])
                compared[0] += 1
                delays.add(output.step - int(request.tree.submitted_at[slot]))
        for chunk in output.prompts:
            prompt = state.requests[chunk.request].tokens
            fresh = states(models, prompt[: chunk.last_position + 1])
            for name, given in chunk.hidden.items():
                same(given, fresh[name.layer][chunk.start :])
                compared[1] += chunk.last_position + 1 - chunk.start
        return output

    parts.executor.collect = checked  # type: ignore[method-assign]
    steps(parts, state)
    return compared[0], compared[1], delays


def reading(
    models: Pair, policy: TreePolicy, stages: int | None, *, early: tuple[HiddenName, ...] = ()
) -> Parts:
    """Random guesses, and two layers that somebody needs: one inside, and the last."""
    source = RandomSource(vocab_size=VOCAB, seed=1)
    source.needs = Needs(hidden=(HiddenName(0), HiddenName(LAYERS - 1)), early_hidden=early)
    return Workbench(models, seed=2).parts(
        source=source, policy=policy, verifier=MatchVerifier(), stages=stages
    )


class TestDelivery:
    @pytest.mark.parametrize("stages", [None, 1, 3])
    def test_every_row_has_the_hidden_state_of_its_path(
        self, models: Pair, stages: int | None
    ) -> None:
        policy = Static(branching=[3, 2]) if stages is None else levels()
        tree_rows, prompt_rows, _ = check_delivery(models, reading(models, policy, stages))
        assert tree_rows > 150 if stages is None else tree_rows >= 48  # whole trees, or roots
        assert prompt_rows == 2 * sum(len(case.prompt) - 1 for case in cases())

    @pytest.mark.parametrize(("layer", "stages"), [(1, LAYERS), (2, LAYERS), (2, None)])
    def test_early_states_arrive_when_their_stage_has_computed_them(
        self, models: Pair, layer: int, stages: int | None
    ) -> None:
        """Four stages of one layer; the deep states of a prompt's chunk come with its end."""
        policy = levels() if stages else Static(branching=[3, 2])
        parts = reading(models, policy, stages, early=(HiddenName(layer),))
        tree_rows, prompt_rows, delays = check_delivery(models, parts)
        assert delays == {layer if stages else 0}
        assert tree_rows > 96
        assert prompt_rows == 3 * sum(len(case.prompt) - 1 for case in cases())

    def test_shifted_rows_show(self, models: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        """Control: rows that belong to their neighbours."""
        right = stage.with_hidden

        def shifted(output, batch, captured):  # type: ignore[no-untyped-def]
            return right(output, batch, {i: rows.roll(1, 0) for i, rows in captured.items()})

        monkeypatch.setattr("specdec.executors.local.with_hidden", shifted)
        with pytest.raises(AssertionError):
            check_delivery(models, reading(models, Static(branching=[3, 2]), None))

    def test_rows_that_are_not_pruned_in_flight_show(
        self, models: Pair, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Control: captured rows that stay where their nodes were pruned."""
        right = InFlight.prune

        def unpruned(self, *args):  # type: ignore[no-untyped-def]
            before = dict(self.captured)
            right(self, *args)
            self.captured = before

        monkeypatch.setattr(InFlight, "prune", unpruned)
        with pytest.raises(AssertionError):
            check_delivery(models, reading(models, levels(), 3))
