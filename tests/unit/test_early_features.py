"""Hidden states of a middle layer, before the answers: a source that proposes from them."""

from __future__ import annotations

from typing import Any

import pytest

from specdec.certify.subject import decode_cases
from specdec.clocks import MeasuredClock
from specdec.compose.planned import planned
from specdec.compose.workbench import Workbench
from specdec.executors import LocalExecutor, PipelineExecutor
from specdec.types import HiddenName, Needs, Output
from specdec.verifiers import MatchVerifier
from tests import early, toys
from tests.toys import EarlyLens, LevelWhenKnown

pytestmark = pytest.mark.slow

CLOCKS = {"simulated": lambda: toys.simulated(10.0, 3.0), "measured": MeasuredClock}


def bench(clock: str = "simulated") -> Workbench:
    return Workbench(toys.pair(), seed=toys.SEED, clock=CLOCKS[clock]())


@pytest.mark.parametrize("clock", CLOCKS)
@pytest.mark.parametrize(
    ("layer", "batch_size", "prefill_chunk"), [(1, 1, 512), (1, 3, 4), (0, 3, 512), (2, 1, 4)]
)
def test_a_pipeline_hands_out_a_state_when_its_stage_computes_it(
    layer: int, batch_size: int, prefill_chunk: int, clock: str
) -> None:
    """Four stages of one layer: the state of layer i is there i steps after the submission."""
    wanted = toys.cases(12)[:: 2 if batch_size == 1 else 1]
    executor = planned(PipelineExecutor, toys.pair(), stages=4)
    parts = early.composed(bench(clock), executor, name=HiddenName(layer))
    seen = early.run(parts, wanted, batch_size=batch_size, prefill_chunk=prefill_chunk)
    assert seen.delays == {layer}
    assert seen.prompt_delays == {layer}
    assert seen.waits == {3 - layer}
    assert seen.error < early.TOLERANCE
    assert seen.compared > 60


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("stages", [1, 4])
def test_the_last_layer_before_and_after_the_final_norm(stages: int, normed: bool) -> None:
    executor = planned(PipelineExecutor, toys.pair(), stages=stages)
    parts = early.composed(bench(), executor, name=HiddenName(3, normed=normed))
    seen = early.run(parts, toys.cases(12)[:4], batch_size=2, prefill_chunk=4)
    assert (seen.delays, seen.prompt_delays) == ({stages - 1}, {stages - 1})
    assert seen.error < early.TOLERANCE


def test_proposals_follow_in_the_next_step_and_save_time() -> None:
    """A node has proposals in the step after that in which the layer computed it.

    Plain decoding takes four steps of 10 ms per token. A hit saves those that its node had begun.
    """
    wanted = toys.cases(12)[::2]
    plain_s = sum(4 * 12 + (len(case.prompt) > 1) for case in wanted) * 10e-3
    for layer in (0, 1, 2):
        executor = planned(PipelineExecutor, toys.pair(), stages=4)
        parts = early.composed(bench(), executor, name=HiddenName(layer))
        submitted: dict[tuple[int, int], int] = {}
        submit = parts.executor.submit

        def noting(batch: Any, submit: Any = submit, submitted: Any = submitted) -> None:
            for rows in batch.trees:
                submitted.update({(rows.request, i): batch.step for i in rows.node_ids.tolist()})
            submit(batch)

        parts.executor.submit = noting  # type: ignore[method-assign]
        early.run(parts, wanted, batch_size=1, prefill_chunk=512)
        source = parts.source
        assert isinstance(source, EarlyLens)
        delays = {step - submitted[request, i] for request, i, step in source.proposed}
        assert delays == {layer + 1}
        assert len(source.proposed) >= 48
        if layer == 2:  # the layer that agrees with the last one often
            assert parts.clock.now() < 0.97 * plain_s


@pytest.mark.parametrize("clock", CLOCKS)
def test_one_device_hands_it_out_with_the_answer(clock: str) -> None:
    parts = early.composed(bench(clock), planned(LocalExecutor, toys.pair()))
    seen = early.run(parts, toys.cases(12), batch_size=3, prefill_chunk=4)
    assert (seen.delays, seen.prompt_delays, seen.waits) == ({0}, {0}, {0})
    assert seen.error < early.TOLERANCE


def test_states_with_the_answers_and_early_ones_come_apart() -> None:
    """A source that needs both gets the deep state of a prompt chunk when it leaves the target."""
    deep = HiddenName(3)
    source = EarlyLens(toys.pair(), name=early.MIDDLE)
    source.needs = Needs(early_hidden=(early.MIDDLE,), hidden=(deep,))
    parts = bench().parts(
        source=source,
        policy=LevelWhenKnown(width=2, children=2),
        verifier=MatchVerifier(),
        executor=planned(PipelineExecutor, toys.pair(), stages=4),
    )
    wanted = toys.cases(12)[:4]
    by_name: dict[HiddenName, list[tuple[int, int]]] = {early.MIDDLE: [], deep: []}
    commit, answered = source.commit, 0

    def noting(commits: Any, output: Any) -> None:
        nonlocal answered
        for chunk in output.prompts:
            (name,) = chunk.hidden
            by_name[name].append((chunk.request, chunk.start))
        for answers in output.answers:
            assert set(answers.hidden) == {deep}
            answered += len(answers.node_ids)
        for one in commits:
            assert set(one.hidden) == {early.MIDDLE, deep}
        commit((), Output(step=output.step))

    source.commit = noting  # type: ignore[method-assign]
    toys.assert_plain(decode_cases(parts, wanted, batch_size=2, prefill_chunk=4), wanted)
    assert by_name[deep] == by_name[early.MIDDLE]
    assert len(by_name[deep]) > 3
    assert answered > 20
