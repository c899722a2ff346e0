"""Ranks in processes give the tokens, hits, steps and counts of the in-process pipeline."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import zip_longest

import pytest
import torch

from specdec.distributed import GroupHandle
from specdec.distributed.executor import DistributedExecutor
from specdec.distributed.row_links import fit_socket
from specdec.errors import UserError
from specdec.metrics import RequestResult
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

pytestmark = pytest.mark.distributed


@pytest.fixture(params=sampled([2, 3], every=2, start=1))
def stages(request: pytest.FixtureRequest, keep_ranks: Callable[..., None]) -> int:
    """Number of stages."""
    keep_ranks(request.param)
    return int(request.param)


@pytest.mark.parametrize("sampling", ["greedy", "t06"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_equal_the_in_process_pipeline(strategy: str, sampling: str, stages: int) -> None:
    same(config(strategy, stages, sampling))


@pytest.mark.parametrize("strategy", ["ar", "specpipe"])
def test_requests_share_batches(strategy: str, stages: int) -> None:
    """A miss of one request flushes only its own rows, on every rank."""
    same(config(strategy, stages, "t08", batch_size=2))


def test_two_sessions_in_turns_keep_their_rows_apart(stages: int) -> None:
    """Two strategies on the same ranks, a step of each in turn, as in ``compare``."""
    both = [config(name, stages, "t06") for name in ("specpipe", "ar")]
    expected = [run(values)[0] for values in both]
    found: list[dict[int, RequestResult]] = [{}, {}]
    with ExitStack() as stack:
        steps = []
        for values, results in zip(both, found, strict=True):
            values["executor"]["transport"] = "distributed"
            there = stack.enter_context(runner(values))
            steps.append(there.in_steps(PROMPTS, partial(_store, results)))
        for _ in zip_longest(*steps):
            pass
    for results, wanted in zip(found, expected, strict=True):
        assert {key: counted(each) for key, each in results.items()} == {
            key: counted(each) for key, each in wanted.items()
        }


def _store(results: dict[int, RequestResult], result: RequestResult) -> None:
    results[result.id] = result


def test_wide_rows_travel(stages: int) -> None:
    """Rows above the size that goes over sockets: 136 float64 are 1088 bytes."""
    assert not fit_socket(136, torch.float64)
    same(config("specpipe", stages, "t06", model__hidden_size=136))


@pytest.mark.parametrize(("strategy", "layer"), [("ppsd", 6), ("ppsd_tree", 3), ("ppsd_multi", 3)])
def test_exits_travel(strategy: str, layer: int, stages: int) -> None:
    """From the first rank, a later one, the last one, or two ranks."""
    head = {"model__exit_layer": layer, "model__exit_head": "transformer"}
    same(config(strategy, stages, "t06", batch_size=2, **head))


def test_distributions_of_exits_travel(stages: int) -> None:
    """Distributions of exits and of answers; with two stages both from the same rank."""
    same(config("ppsd", stages, "t08", verifier=rejection(), model__exit_layer=5))
    same(config("ppsd_multi", stages, "t08", verifier=rejection(), model__exit_layer=2))


@pytest.mark.parametrize(("policy", "batch_size"), [("medusa", 2), ("specpipe", 1)])
def test_hidden_states_travel(policy: str, batch_size: int, stages: int) -> None:
    """Hidden states of prompts, whole trees and levels, for heads on rank 0."""
    values = config("medusa", stages, "t06", batch_size=batch_size)
    values["policy"] = config(policy, stages)["policy"]
    same(values)


def test_one_stage_has_latency_one(keep_ranks: Callable[..., None]) -> None:
    keep_ranks(1)
    same(config("specinfer", 1, "t06"))


def test_a_comparison_starts_processes_once(stages: int) -> None:
    """Concurrent executors share ranks; a run of one does not affect the others."""
    rows = [config(name, stages, distributed=True) for name in ("ar", "specpipe")]
    expected = run(config("ar", stages))[0]
    with runner(rows[0]) as first, runner(rows[1]) as second:
        executors = [first.parts.executor, second.parts.executor]
        assert all(isinstance(e, DistributedExecutor) for e in executors)
        assert executors[0]._group is executors[1]._group  # type: ignore[attr-defined]
        for _ in range(2):  # prompt ids come again: caches of the last run must be gone
            for made in (first, second):
                found: dict[int, RequestResult] = {}
                made.run(PROMPTS, lambda r, into=found: into.__setitem__(r.id, r))  # type: ignore
                assert {k: r.output for k, r in found.items()} == {
                    k: r.output for k, r in expected.items()
                }


def test_a_cancelled_request_leaves_the_ranks(stages: int) -> None:
    """Its rows are in flight when it is closed; the next request has the same id."""
    expected = run(config("ar", stages))[0]
    with runner(config("specpipe", stages, distributed=True)) as made:
        state = made.parts.new_state()
        for number, _ in enumerate(made.steps(state, PROMPTS[:2], lambda request: None)):
            if number == stages + 2:
                for request in state.requests.values():
                    request.cancel()
        found: dict[int, RequestResult] = {}
        made.run(PROMPTS, lambda result: found.__setitem__(result.id, result))
    assert {k: r.output for k, r in found.items()} == {k: r.output for k, r in expected.items()}


def test_reports_count_what_ranks_did(stages: int) -> None:
    with runner(config("ar", stages, distributed=True)) as made:
        made.run(PROMPTS, lambda result: None)
        executor = made.parts.executor
        assert isinstance(executor, DistributedExecutor)
        reports = executor.reports()
    rows = executor.counters.rows + executor.counters.prefill_rows
    assert [r["rows"] for r in reports] == [rows] * stages, "plain decoding prunes nothing"
    assert all(r["bytes_sent"] > 0 for r in reports)
    assert [r["clock"]["rank"] for r in reports] == list(range(1, stages + 1))


def test_groups_of_ranks_survive_what_concerns_one_strategy(
    keep_ranks: Callable[..., None],
) -> None:
    """A refused strategy releases its ranks."""
    keep_ranks(2)
    with pytest.raises(UserError, match="bias"):
        run(config("specpipe", 2, "t08", distributed=True, verifier=rejection()))
    same(config("ar", 2))


@pytest.mark.exhaustive
def test_eight_stages() -> None:
    handle = GroupHandle(8, threads=1)
    try:
        for strategy in STRATEGIES:
            same(config(strategy, 8, "t06"))
    finally:
        handle.release()
