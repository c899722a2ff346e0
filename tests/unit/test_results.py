"""Reading run folders returns what was written, as objects and data frames."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from specdec.files import write_json, write_text
from specdec.metrics import Run, RunTotals, comparison_row, summarise
from specdec.report import results
from specdec.report.results import ENDS_FILE, RequestRecord, RequestWriter
from tests.unit.test_metrics import make_result

pd = pytest.importorskip("pandas")

SHARED = {"seed": 0, "data": {"name": "stdlib", "limit": 2}, "clock": {"kind": "simulated"}}
CONDITIONS = {"clock": "simulated", "data": "stdlib", "num_prompts": 2}


def config_of(strategy: str, **keys: Any) -> dict[str, Any]:
    source = {"_target_": "specdec.sources.DraftModelSource"}
    return {"strategy": {"name": strategy}, "source": source, "executor": {}, **SHARED, **keys}


def runs_of(strategy: str, gap_s: float) -> Run:
    """Two prompts of five tokens; ``ar`` emits one token per answer, others two."""
    found = []
    for prompt in range(2):
        chunks = [[1], [2], [3], [4], [5]] if strategy == "ar" else [[1], [2, 3], [4, 5]]
        times = [gap_s * (i + 1 + prompt) for i in range(len(chunks))]
        found.append(make_result(chunks, times=times, prompt_id=prompt))
    return Run(tuple(found), RunTotals(steps=10, target_passes=10, clock="simulated", clock_s=1.0))


def write(folder: Path, config: Mapping[str, Any], run: Run, *, finished: bool = True) -> None:
    write_text(folder / "config.yaml", yaml.safe_dump(dict(config)))
    name = config["strategy"]["name"]
    zero = RunTotals(clock="simulated")
    with RequestWriter(folder / "requests.jsonl") as writer:
        for i, result in enumerate(run.results):
            writer.write(RequestRecord(name, 0, result, zero if i else run.totals))
    if finished:
        summary = summarise(run.results, run.totals)
        whole = {"strategy": name, "claims": "token", **summary, "conditions": CONDITIONS}
        write_json(folder / "summary.json", whole)
    ends = {str(r.id): [i + 1 for i in range(len(r.output))] for r in run.results}
    write_json(folder / ENDS_FILE, {name: ends})


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Two strategies, two seeds; one job was interrupted."""
    for strategy, gap in (("ar", 0.1), ("speculative", 0.1)):
        for seed in (0, 1):
            job = tmp_path / "sweep" / f"strategy={strategy},seed={seed}"
            finished = (strategy, seed) != ("speculative", 1)
            run = runs_of(strategy, gap)
            write(job, config_of(strategy, seed=seed), run, finished=finished)
    return tmp_path / "sweep"


@pytest.fixture
def comparison(tmp_path: Path) -> Path:
    folder = tmp_path / "compared"
    runs = {name: runs_of(name, 0.1) for name in ("ar", "speculative")}
    own = {name: config_of(name) for name in runs}
    write_text(folder / "config.yaml", yaml.safe_dump({"command": "compare", "strategies": own}))
    with RequestWriter(folder / "requests.jsonl") as writer:
        for name, run in runs.items():
            for i, result in enumerate(run.results):
                totals = RunTotals(clock="simulated") if i else run.totals
                writer.write(RequestRecord(name, 0, result, totals))
    rows = [comparison_row(name, [run], [runs["ar"]]) for name, run in runs.items()]
    write_json(folder / "comparison.json", {"rows": rows, "conditions": CONDITIONS})
    return folder


def test_a_sweep_is_one_row_per_job_with_its_configuration(sweep: Path) -> None:
    frame = results.frame(sweep)
    assert list(frame["name"]) == sorted(p.name for p in sweep.iterdir())
    assert list(frame["config.seed"]) == [0, 1, 0, 1]
    assert list(frame["complete"]) == [True, True, True, False]
    assert list(frame["prompts_finished"]) == [2, 2, 2, 2], "an interrupted job's prompts count"
    speed = frame.pivot_table("tokens_per_s", "config.seed", "strategy")
    # After the first emission of 1 token, 4 tokens in 4 or in 2 gaps of 0.1 s.
    assert speed.loc[0, "ar"] == pytest.approx(10.0)
    assert speed.loc[0, "speculative"] == pytest.approx(20.0)
    assert np.isnan(frame["tokens_per_s"].iloc[3]), "no metric of half a run"


def test_a_comparison_is_one_row_per_strategy(comparison: Path) -> None:
    frame = results.frame(comparison).set_index("strategy")
    assert frame.loc["speculative", "speedup_wall"] == pytest.approx(2.0)
    assert bool(frame.loc["speculative", "lossless"])
    assert set(results.prompt_frame(comparison)["strategy"]) == {"ar", "speculative"}


def test_prompts_and_tokens(sweep: Path) -> None:
    prompts = results.prompt_frame(sweep)
    assert len(prompts) == 8
    ours = prompts[prompts["strategy"] == "speculative"].iloc[0]
    assert ours["new_tokens"] == 5
    assert ours["acceptance_length"] == pytest.approx(5 / 3)
    tokens = results.token_frame(sweep / "strategy=ar,seed=0")
    assert list(tokens["token"]) == [1, 2, 3, 4, 5] * 2
    assert list(tokens["position"]) == [0, 1, 2, 3, 4] * 2
    assert tokens["emitted_s"].iloc[4] == pytest.approx(0.5)


def test_the_baseline_differs_only_in_its_parts(sweep: Path) -> None:
    found = {r.name: r for r in results.read(sweep)}
    plain = results.baseline_of(found["strategy=speculative,seed=1"], found.values())
    assert plain is found["strategy=ar,seed=1"].runs, "another seed is another experiment"
    found["strategy=ar,seed=1"].config["executor"] = {"stages": 8}
    assert results.baseline_of(found["strategy=speculative,seed=1"], found.values()) == []
