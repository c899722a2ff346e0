"""Ranks that die, hang or raise: one clear error, no orphans, and a rerun that resumes."""

import importlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdec.compose.workbench import Workbench, build
from specdec.distributed.ranks import Ranks
from specdec.errors import RankFailure
from specdec.sampling.transform import SamplingParams
from specdec.state import RequestState, StopRules
from tests import toys
from tests.distributed.processes import is_alive, ranks_of, started, wait_until
from tests.distributed.support import config, runner

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

LIMIT_S = 90.0  # the promise is 15 s; this machine may be busy with other tests
RANK_FAILED, INTERRUPTED, TERMINATED = 3, 130, 143
EARLY_EXIT = ("strategy=ppsd", "model.exit_layer=1")
"""Rank 1 sends exits, rank 2 answers; they run free, and rank 0 waits for either."""

SWIFTSPEC = (
    *("strategy=swiftspec", "~policy.width", "~policy.children", "executor.stages=1"),
    *("executor.target_degree=2", "executor.draft_degree=1"),
)
"""Two ranks share the target; the draft is rank 0's own."""


def lines(folder: Path) -> list[dict[str, Any]]:
    """Finished prompts on disk, from complete lines."""
    file = folder / "requests.jsonl"
    text = file.read_text() if file.is_file() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def fail(folder: Path, what: signal.Signals, rank: int, *overrides: str) -> tuple[int, str, float]:
    """Sends a signal to a rank (0: the command) during a run.

    Returns:
        Exit status, standard error, and seconds until the command ended.
    """
    with started(folder, *overrides) as command:
        wait_until(lambda: len(lines(folder)) >= 2 or command.status is not None, "two prompts")
        assert command.status is None, command.message
        everyone = ranks_of(command.pid)
        assert len(everyone) == 4, "two ranks, their keeper and the fork server"
        start = time.monotonic()
        os.kill(everyone[rank - 1] if rank else command.pid, what)
        command.wait(200.0)
        took = time.monotonic() - start
        wait_until(lambda: not any(map(is_alive, everyone)), "all processes gone", 60.0)
        assert command.status is not None
        return command.status, command.message, took


def check_resumes(folder: Path) -> None:
    """The same command resumes after the finished prompts."""
    before = lines(folder)
    assert len(before) >= 2
    done = len(before) + 2
    # A rerun of the whole set would take long: its continuation is what matters.
    with started(folder) as command:
        wait_until(lambda: len(lines(folder)) >= done or command.status is not None, "two more")
    after = lines(folder)
    assert after[: len(before)] == before, "what was finished is not done again"
    ids = [line["id"] for line in after]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize(
    ("rank", "overrides"),
    [
        (1, ()),
        pytest.param(2, (), marks=pytest.mark.exhaustive),
        pytest.param(1, EARLY_EXIT, marks=pytest.mark.exhaustive),
    ],
)
def test_a_killed_stage_is_named(rank: int, overrides: tuple[str, ...], tmp_path: Path) -> None:
    status, message, took = fail(tmp_path / "run", signal.SIGKILL, rank, *overrides)
    assert status == RANK_FAILED
    said = message.strip().splitlines()[-1]
    assert f"rank {rank} " in said, message
    assert "SIGKILL" in said, message
    assert "Traceback" not in message
    assert took < LIMIT_S
    if rank == 1 and not overrides:
        check_resumes(tmp_path / "run")


def test_a_stopped_stage_is_named_within_the_timeout(tmp_path: Path) -> None:
    status, message, took = fail(tmp_path / "run", signal.SIGSTOP, 1, "executor.timeout_s=4")
    assert status == RANK_FAILED
    said = message.strip().splitlines()[-1]
    for word in ("rank 1 ", "sign of life", "timeout_s=4"):
        assert word in said, message
    assert took < 4 + LIMIT_S


def test_a_rank_that_stops_before_its_counters_are_read_is_named() -> None:
    """Between prompts rank 0 waits in the store: once this ended after 120 s only."""
    model = {"kind": "random", **toys.MODEL}
    ranks = Ranks(model=model, clock={"kind": "measured"}, threads=1, timeout_s=1.0)
    bench = Workbench(toys.pair(), seed=toys.SEED, ranks=ranks)
    keys = {"executor.stages": 2, "executor.transport": "distributed"}
    executor = build("specpipe", bench, **keys).executor
    assert len(executor.reports()) == 2
    os.kill(executor._group.pids[0], signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(
        RankFailure, match=r"rank 1 .* nothing has moved for executor\.timeout_s=1 s"
    ):
        executor.reports()
    assert time.monotonic() - start < LIMIT_S


@pytest.mark.parametrize(
    ("number", "expected", "said"),
    [
        (signal.SIGTERM, TERMINATED, "SIGTERM"),
        pytest.param(signal.SIGINT, INTERRUPTED, "interrupted", marks=pytest.mark.exhaustive),
    ],
)
def test_ctrl_c_ends_everything_and_says_how_to_go_on(
    number: signal.Signals, expected: int, said: str, tmp_path: Path
) -> None:
    status, message, took = fail(tmp_path / "run", number, 0)
    assert status == expected
    assert said in message
    assert "Traceback" not in message
    assert took < LIMIT_S
    check_resumes(tmp_path / "run")


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param((), id="specpipe"),
        pytest.param(SWIFTSPEC, id="swiftspec", marks=pytest.mark.exhaustive),
    ],
)
def test_ranks_do_not_outlive_a_killed_controller(
    overrides: tuple[str, ...], tmp_path: Path
) -> None:
    status, _, _ = fail(tmp_path / "run", signal.SIGKILL, 0, *overrides)
    assert status == -signal.SIGKILL


class Fails:
    """A logits processor that raises on the first rank that uses it."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("planted in a stage")


@pytest.mark.parametrize(("strategy", "rank"), [("ar", 2), ("ppsd", 1)])
def test_an_exception_in_a_rank_is_reported(strategy: str, rank: int) -> None:
    """The last rank answers; the first one, with the exit, proposes before that."""
    free = {"executor__lock_step": strategy != "ppsd"}
    with runner(config(strategy, 2, distributed=True, **free)) as made:
        request = RequestState(
            request_id=1,
            prompt=np.array([1, 2, 3]),
            stop=StopRules(max_new_tokens=4),
            sampling=SamplingParams(processors=(Fails(),)),
        )
        pids = made.parts.executor.pids or []
        with pytest.raises(RankFailure, match=rf"rank {rank} .*ArithmeticError: planted"):
            list(made.parts.decode(made.parts.new_state(), [request]))
    assert not any(map(is_alive, pids))


def test_what_a_rank_refuses_is_the_users_error() -> None:
    """Ranks cannot build the configured model."""
    values = config("ar", 2, distributed=True, model__num_heads=5)
    from specdec.runs.runners import PartsRunner
    from tests.distributed.support import pair

    with pytest.raises((RankFailure, ValueError), match=r"rank [12]"):
        PartsRunner(cfg=values, pair=pair(), stop=StopRules(max_new_tokens=4))


def test_a_run_that_fails_at_once_leaves_nobody(tmp_path: Path) -> None:
    with started(tmp_path / "run", "executor.stages=3") as command:
        command.wait(300.0)
    assert command.status == 2
    assert "executor.stages=3" in command.message


def test_a_rank_killed_while_it_loads_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank is killed when it receives the message to load its layers."""
    group = importlib.import_module("specdec.distributed.group").RankGroup
    announce, pids = group.announce, list[int]()

    def kill(self: Any, plan: Any) -> int:
        pids.extend(self.pids)
        os.kill(pids[0], signal.SIGSTOP)  # so that it cannot finish first
        session = announce(self, plan)
        os.kill(pids[0], signal.SIGKILL)
        return int(session)

    monkeypatch.setattr(group, "announce", kill)
    with (
        pytest.raises(RankFailure, match=r"rank 1 .*SIGKILL"),
        runner(config("ar", 2, distributed=True)),
    ):
        raise AssertionError("a rank that is gone was ready")
    assert len(pids) == 2
    wait_until(lambda: not any(map(is_alive, pids)), "all ranks gone", 60.0)
