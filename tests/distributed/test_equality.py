"""Compositions over ranks give the tokens, hits, steps and counts of the in-process pipeline.

All of them with threads as ranks, where only processes and gloo are replaced; some with processes.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import product, zip_longest
from typing import Any

import pytest

from specdec.distributed import GroupHandle
from specdec.distributed.executor import DistributedExecutor
from specdec.errors import UserError
from specdec.executors.stage import split_layers
from specdec.metrics import RequestResult
from tests.distributed.fake_ranks import ThreadGroup, thread_ranks
from tests.distributed.support import (
    PROMPTS,
    STRATEGIES,
    config,
    counted,
    rejection,
    run,
    runner,
    same,
)
from tests.sampled import sampled

pytestmark = pytest.mark.slow

BATCH, HEAD = {"batch_size": 3}, {"model__exit_head": "transformer"}
COMPOSITIONS: list[tuple[str, int, str, dict[str, Any]]] = [
    *((*each, {}) for each in [*product(STRATEGIES, [1, 2, 3, 8], ["greedy", "t06"])][::3]),
    # In turns specinfer drafts for the requests that wait while the target is busy.
    *(
        (strategy, stages, "t08", {**BATCH, "serving__feeding": feeding})
        for strategy, stages, feeding in (
            ("ar", 2, "micro_batches"),
            ("ar", 8, "micro_batches"),
            ("ar", 2, "dynamic"),
            ("specinfer", 2, "dynamic"),
            ("specinfer", 8, "dynamic"),
            ("specpipe", 2, "iteration"),
            ("specpipe", 8, "iteration"),
            ("specpipe", 2, "dynamic"),
        )
    ),
    # PipeDec's groups of devices.
    *(
        (strategy, len(groups), "t06", {"executor__groups": groups})
        for strategy, groups in (
            ("ar", [1, 2]),
            ("ar", [3, 1, 2, 1]),
            ("pipedec", [1, 2]),
            ("pipedec", [2, 1]),
            ("pipedec", [2, 2, 2]),
            ("pipedec", [3, 1, 2, 1]),
        )
    ),
    ("specpipe", 2, "t06", {"executor__groups": [2, 1], "executor__split": "balanced"}),
    ("specpipe", 3, "no_repeat4", {}),  # the last rank rebuilds paths from rows
    ("speculative", 3, "t08", {"verifier": rejection()}),
    # Without filters: whole distributions come with the answers.
    ("specinfer", 2, "t08", {"batch_size": 2, "verifier": rejection(), "sampling__top_p": 1.0}),
    ("speculative", 3, "t08", {"batch_size": 2, "verifier": rejection(), "sampling__top_p": 1.0}),
    *(  # exits of the first rank, a later one, the last one, or two ranks
        (strategy, stages, "t06", {**HEAD, "batch_size": 2, "model__exit_layer": layer})
        for stages in (2, 3)
        for strategy, layer in (("ppsd", 6), ("ppsd_tree", 3), ("ppsd_multi", 3))
    ),
    ("ppsd", 2, "t08", {"verifier": rejection(), "model__exit_layer": 5}),
    ("ppsd_multi", 2, "t08", {"verifier": rejection(), "model__exit_layer": 2}),
    ("medusa", 2, "t06", {"batch_size": 2}),
    ("medusa", 3, "t06", {"policy": "specpipe"}),
]


def composed(strategy: str, stages: int, sampling: str, keys: dict[str, Any]) -> dict[str, Any]:
    if "policy" in keys:
        keys = {**keys, "policy": config(keys["policy"], stages)["policy"]}
    return config(strategy, stages, sampling, **keys)


def num_ranks(stages: int, keys: dict[str, Any]) -> int:
    return sum(keys.get("executor__groups", [1] * stages))


@pytest.fixture
def threads() -> Iterator[ThreadGroup]:
    """Eight ranks, of which executors use the first ones."""
    with thread_ranks(9) as made:
        yield made


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("strategy", "stages", "sampling", "keys"), COMPOSITIONS)
def test_over_threads(strategy: str, stages: int, sampling: str, keys: dict[str, Any]) -> None:
    values = composed(strategy, stages, sampling, keys)
    same(values)
    with runner(values) as made:
        executor = made.parts.executor
        assert isinstance(executor, DistributedExecutor)
        assert executor.latency == stages, "the number of stages, not of devices"
        sizes = keys.get("executor__groups", [1] * stages)
        of_ranks = [stage for stage, size in enumerate(sizes, 1) for _ in range(size)]
        assert list(executor.stage_of_rank.values()) == of_ranks


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("strategy", "stages", "sampling", "keys"),
    sampled([one for one in COMPOSITIONS if num_ranks(one[1], one[3]) <= 3], every=2),
)
def test_over_processes(
    strategy: str,
    stages: int,
    sampling: str,
    keys: dict[str, Any],
    keep_ranks: Callable[..., None],
) -> None:
    keep_ranks()
    same(composed(strategy, stages, sampling, keys))


@pytest.mark.distributed
@pytest.mark.parametrize(("strategy", "batch_size"), [("ppsd", 1), ("ppsd_tree", 2)])
def test_processes_that_run_free(
    strategy: str, batch_size: int, keep_ranks: Callable[..., None]
) -> None:
    """A rank reads commits that arrive while it waits for rows; the tokens are the same."""
    keep_ranks()
    keys = {"executor__lock_step": False, "batch_size": batch_size, "model__exit_layer": 3}
    expected, _ = run(config(strategy, 3, "t06", **keys))
    found, _ = run(config(strategy, 3, "t06", distributed=True, **keys))
    assert {k: r.output for k, r in found.items()} == {k: r.output for k, r in expected.items()}


@pytest.mark.exhaustive
@pytest.mark.distributed
def test_eight_processes() -> None:
    handle = GroupHandle(8, threads=1)
    try:
        for strategy in STRATEGIES:
            same(config(strategy, 8, "t06"))
    finally:
        handle.release()


def check_cancelling(steps: range) -> None:
    """Rows are in flight when requests are closed; the next run uses the same prompt ids."""
    expected = run(config("ar", 3))[0]
    for when in steps:
        with runner(config("specpipe", 3, distributed=True)) as made:
            state = made.parts.new_state()
            for number, _ in enumerate(made.steps(state, PROMPTS[:2], lambda request: None)):
                if number == when:
                    for request in state.requests.values():
                        request.cancel()
            found: dict[int, RequestResult] = {}
            made.run(PROMPTS, partial(_store, found))
        assert {k: r.output for k, r in found.items()} == {k: r.output for k, r in expected.items()}


@pytest.mark.usefixtures("threads")
def test_a_cancelled_request_leaves_no_trace() -> None:
    check_cancelling(range(2, 9, 2))


@pytest.mark.distributed
def test_a_cancelled_request_leaves_processes(keep_ranks: Callable[..., None]) -> None:
    keep_ranks()
    check_cancelling(range(5, 6))


def _store(results: dict[int, RequestResult], result: RequestResult) -> None:
    results[result.id] = result


@pytest.mark.distributed
def test_two_sessions_in_turns_keep_their_rows_apart(keep_ranks: Callable[..., None]) -> None:
    """Two strategies on the same ranks, a step of each in turn, as in ``compare``; twice."""
    keep_ranks()
    both = [config(name, 3, "t06", distributed=True) for name in ("specpipe", "ar")]
    expected = [run(config(name, 3, "t06"))[0] for name in ("specpipe", "ar")]
    with ExitStack() as stack:
        runners = [stack.enter_context(runner(values)) for values in both]
        for _ in range(2):  # prompt ids come again: caches of the last run must be gone
            found: list[dict[int, RequestResult]] = [{}, {}]
            steps = [
                there.in_steps(PROMPTS, partial(_store, results))
                for there, results in zip(runners, found, strict=True)
            ]
            for _ in zip_longest(*steps):
                pass
            for results, wanted in zip(found, expected, strict=True):
                assert {key: counted(each) for key, each in results.items()} == {
                    key: counted(each) for key, each in wanted.items()
                }


@pytest.mark.distributed
def test_reports_count_what_ranks_did(keep_ranks: Callable[..., None]) -> None:
    keep_ranks()
    with runner(config("ar", 2, distributed=True)) as made:
        made.run(PROMPTS, lambda result: None)
        executor = made.parts.executor
        assert isinstance(executor, DistributedExecutor)
        reports = executor.reports()
    rows = executor.counters.rows + executor.counters.prefill_rows
    assert [r["rows"] for r in reports] == [rows] * 2, "plain decoding prunes nothing"
    assert all(r["bytes_sent"] > 0 for r in reports)
    assert [r["clock"]["rank"] for r in reports] == [1, 2]


@pytest.mark.distributed
def test_a_refused_strategy_releases_its_ranks(keep_ranks: Callable[..., None]) -> None:
    keep_ranks()
    with pytest.raises(UserError, match="bias"):
        run(config("specpipe", 2, "t08", distributed=True, verifier=rejection()))
    same(config("ar", 2))


def test_the_head_counts_in_a_balanced_split() -> None:
    """The split minimises the time of the slowest stage."""
    assert split_layers(24, 8) == [(3 * i, 3 * i + 3) for i in range(8)]
    sizes = [b - a for a, b in split_layers(24, 8, head_layers=2.5)]
    assert sizes == [4, 4, 3, 3, 3, 3, 3, 1]


@pytest.mark.distributed
def test_fewer_ranks_join_a_running_group(keep_ranks: Callable[..., None]) -> None:
    """The smaller executor starts no process, and its ``pids`` are those of its own ranks."""
    keep_ranks()
    many = GroupHandle(3, threads=1)
    with runner(config("ar", 2, distributed=True)) as few:
        assert few.pids == many.group.pids[:2] != many.group.pids
    assert many.group.alive
    many.release()
