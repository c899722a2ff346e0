"""The distributed pipeline with threads as ranks: messages, sessions and in-flight rows.

Only processes and gloo are replaced, so that these tests are fast.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest

from specdec.distributed.executor import DistributedExecutor
from specdec.distributed.kept_rows import KeptRows
from specdec.distributed.replies import Reply
from specdec.executors.stage import split_layers
from specdec.types import IntArray
from tests.distributed.fake_ranks import ThreadGroup, thread_ranks
from tests.distributed.support import PROMPTS, STRATEGIES, config, rejection, run, runner, same
from tests.sampled import sampled

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def group() -> Iterator[ThreadGroup]:
    """Eight ranks, of which executors use the first ones."""
    with thread_ranks(9) as made:
        yield made


@pytest.mark.parametrize(
    ("strategy", "stages", "sampling"),
    sampled(product(STRATEGIES, [1, 2, 3, 8], ["greedy", "t06"]), every=3),
)
def test_equal_to_the_in_process_pipeline(strategy: str, stages: int, sampling: str) -> None:
    same(config(strategy, stages, sampling))


@pytest.mark.parametrize("stages", [2, 8])
@pytest.mark.parametrize(
    ("strategy", "feeding"),
    [
        ("ar", "micro_batches"),
        ("ar", "dynamic"),
        ("specinfer", "dynamic"),  # by turns it drafts for those that wait while the target is busy
        ("specpipe", "iteration"),
        ("specpipe", "dynamic"),
    ],
)
def test_requests_share_batches(strategy: str, feeding: str, stages: int) -> None:
    same(config(strategy, stages, "t08", batch_size=3, serving__feeding=feeding))


@pytest.mark.parametrize("groups", [[1, 2], [2, 1], [2, 2, 2], [3, 1, 2, 1]])
@pytest.mark.parametrize("strategy", ["ar", "pipedec"])
def test_stages_of_several_devices(strategy: str, groups: list[int]) -> None:
    """PipeDec's groups: the latency is the number of stages, not of devices."""
    values = config(strategy, len(groups), "t06", executor__groups=groups)
    same(values)
    with runner(values) as made:
        assert isinstance(made.parts.executor, DistributedExecutor)
        assert made.parts.executor.latency == len(groups)
        assert list(made.parts.executor.stage_of_rank.values()) == [
            stage for stage, size in enumerate(groups, 1) for _ in range(size)
        ]


def test_histories_and_distributions_travel() -> None:
    same(config("specpipe", 3, "no_repeat4"))
    same(config("speculative", 3, "t08", verifier=rejection()))


@pytest.mark.parametrize(
    ("strategy", "stages"),
    [("speculative", 1), ("speculative", 3), ("specinfer", 2), ("specpipe", 2), ("specpipe", 3)],
)
def test_whole_distributions_stay_on_the_last_rank(
    strategy: str, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 asks for a node's row only where it has rejected the node's first child."""
    asked: list[bool] = []
    answer = KeptRows.answer

    def counting(self: KeptRows, packed: IntArray) -> Reply:
        reply = answer(self, packed)
        asked.append(reply.rows is not None)
        return reply

    monkeypatch.setattr(KeptRows, "answer", counting)
    keys = {"sampling__top_p": 1.0, "verifier": rejection(), "batch_size": 2}
    if strategy == "specpipe":
        keys |= {"policy__width": 1, "policy__children": 1}
    values = config(strategy, stages, "t08", **keys)
    same(values)
    results = run(values)[0].values()
    rejected = sum(r.counters.verified - r.counters.accepted for r in results)
    rows = sum(asked) // 2  # it ran twice
    assert 0 < rows <= rejected
    # Whole trees: children's probabilities come with the answers. Otherwise rank 0 asks for them.
    assert all(asked) == (strategy != "specpipe")


def test_a_cancelled_request_leaves_no_trace() -> None:
    """Its rows are in flight when it is closed; the next run uses the same prompt ids."""
    expected = run(config("ar", 3))[0]
    for when in range(2, 9):
        with runner(config("specpipe", 3, distributed=True)) as made:
            state = made.parts.new_state()
            for number, _ in enumerate(made.steps(state, PROMPTS[:2], lambda request: None)):
                if number == when:
                    for request in state.requests.values():
                        request.cancel()
            found = {}
            made.run(PROMPTS, lambda result, into=found: into.__setitem__(result.id, result))
        assert {k: r.output for k, r in found.items()} == {k: r.output for k, r in expected.items()}


def test_the_head_counts_in_a_balanced_split() -> None:
    """The split minimises the time of the slowest stage."""
    assert split_layers(24, 8) == [(3 * i, 3 * i + 3) for i in range(8)]
    sizes = [b - a for a, b in split_layers(24, 8, head_layers=2.5)]
    assert sizes == [4, 4, 3, 3, 3, 3, 3, 1]
    assert sum(sizes) == 24
