"""No graph is captured within a run whose time is measured."""

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from specdec.clocks import timed_runs
from specdec.config.job import run_job_of
from specdec.models.backends import graphs
from specdec.models.execution import Execution
from specdec.models.random import random_model
from specdec.runs import jobs
from specdec.runs.jobs import run_job
from specdec.runs.progress import Progress
from specdec.runs.runners import PartsRunner
from specdec.types import TreeRows
from tests.emulated.device import emulated
from tests.shapes import runner_of
from tests.trees import grown


def _captures(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each capture from now on, whether it was within a measured run."""
    found: list[bool] = []
    measured = False
    run, capture = PartsRunner.run, graphs.capture

    def observed_run(self, prompts, on_finish, book=None):
        nonlocal measured
        measured = book is not None  # warm-ups have none
        try:
            return run(self, prompts, on_finish, book)
        finally:
            measured = False

    def observed_capture(launch, pool):
        found.append(measured)
        return capture(launch, pool)

    monkeypatch.setattr(PartsRunner, "run", observed_run)
    monkeypatch.setattr(graphs, "capture", observed_capture)
    return found


def _decode(folder: Path, *words: str) -> int:
    """Decodes three prompts of different lengths; returns the number of replays."""
    size = ("model.num_layers=2", "model.hidden_size=32", "model.vocab_size=256")
    words = ("model=random", *size, "model.device=cuda", "model.graphs=cuda", *words)
    cfg = run_job_of([*words, "data=stdlib", "data.limit=3", "max_new_tokens=6"]).config
    with emulated() as device:
        run_job(cfg, folder, Progress())
        return sum(graph.replays for graph in device.graphs)


@pytest.mark.slow
@pytest.mark.parametrize("batch, warms_up", [(2, True), (1, False)])
def test_runs_capture_nothing(
    batch: int, warms_up: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a warm-up, and without one: then the first prompt runs without graphs."""
    if not warms_up:
        monkeypatch.setattr(jobs, "warm_up", lambda *_: None)
    captures = _captures(monkeypatch)
    replays = _decode(tmp_path, "strategy=best_first", "sampling=t06", f"batch_size={batch}")
    assert captures
    assert not any(captures)
    assert replays > 20  # the passes of measured runs are replays


@pytest.mark.slow
def test_captures_in_runs_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: without ``timed_run`` shapes are captured where they first occur."""
    monkeypatch.setattr(jobs, "timed_run", nullcontext)
    monkeypatch.setattr(jobs, "warm_up", lambda *_: None)
    captures = _captures(monkeypatch)
    _decode(tmp_path, "strategy=best_first", "sampling=t06")
    assert any(captures)


def test_smaller_shapes_are_captured_before_a_run() -> None:
    """Fewer rows and shorter contexts; captured passes leave the caches of open requests alone."""
    whole = random_model("llama", dtype="float64", num_layers=2)
    plain = runner_of(whole)
    with emulated() as device:
        model = random_model("llama", dtype="float64", device="cuda", num_layers=2)
        runner = runner_of(model, execution=Execution(graphs="cuda"))
        cache = runner.new_cache(200)
        rows = grown(runner, cache, prefix=150, nodes=8)
        runner.forward([rows])
        before = len(device.graphs)
        timed_runs.begin_timed_run()
        try:
            # 1, 2, 4 and 8 rows at contexts of 64, 128 and 256 slots, of which one was captured;
            # the prompt ran in a chunk of more than 64 rows.
            assert len(device.graphs) == before + 4 * 3 - 1
            num = len(device.graphs)
            found = runner.forward([_one_more(cache)]).logits
            assert len(device.graphs) == num
            short = runner.new_cache(200)
            runner.forward([grown(runner, short, prefix=20, nodes=3)])  # another arena: no graph
            assert len(device.graphs) == num
        finally:
            timed_runs.end_timed_run()
        runner.forward([grown(runner, runner.new_cache(200), prefix=20, nodes=3)])
        assert len(device.graphs) > num
        assert found is not None
        found = found.cpu()
    expected_cache = plain.new_cache(200)
    plain.forward([grown(plain, expected_cache, prefix=150, nodes=8)])
    expected = plain.forward([_one_more(expected_cache)]).logits
    assert (found - expected).abs().max() < 1e-12


def _one_more(cache):
    """A row at the end of a cache with 150 tokens and 8 nodes."""
    one = {"node_ids": np.array([1000]), "tokens": np.array([5]), "parent_ids": np.array([-1])}
    return cache.rows(tree=TreeRows.within(prefix_len=150, **one))
