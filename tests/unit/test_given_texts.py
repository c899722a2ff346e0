"""``model=transcript`` with a draft model: trees as beside the target that wrote the text."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from specdec.config.job import run_job_of
from specdec.runs.jobs import prepare, stop_rules
from specdec.runs.runners import PartsRunner

SIZE = ("max_new_tokens=24", "clock=simulated", "clock.profile=uniform_30ms", "threads=1")


def decode(*words: str) -> tuple[list[Any], Any, Any]:
    """(prompts, results, totals) of a run."""
    cfg = run_job_of([*SIZE, *words]).config
    pair, prompts, _ = prepare(cfg)
    runner = PartsRunner(cfg=cfg, pair=pair, stop=stop_rules(cfg, pair))
    results: list[Any] = []
    try:
        totals = runner.run(prompts, results.append)
    finally:
        runner.close()
    return prompts, sorted(results, key=lambda result: result.id), totals


@pytest.fixture(scope="module", params=["greedy", "t06"])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(sampling, file of the texts that the bundled target wrote)."""
    sampling = f"sampling={request.param}"
    prompts, results, _ = decode(
        "strategy=ar", "model=tiny", "data=stdlib", "data.limit=2", sampling
    )
    path = tmp_path_factory.mktemp("texts") / "log.jsonl"
    lines = [
        {"prompt_token_ids": prompt.tokens.tolist(), "output_token_ids": list(result.output)}
        for prompt, result in zip(prompts, results, strict=True)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return sampling, path


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        ("strategy=best_first",),
        ("strategy=specpipe", "executor.stages=4", "policy.width=8", "policy.children=4"),
    ],
    ids=lambda words: words[0].partition("=")[2],
)
def test_trees_are_those_of_the_target_that_wrote_the_text(
    written: tuple[str, Path], strategy: tuple[str, ...]
) -> None:
    """Tokens, passes, rows, hits and draft passes: every counter, wrong nodes included."""
    sampling, path = written
    _, real, totals = decode("model=tiny", "data=stdlib", "data.limit=2", sampling, *strategy)
    given = ("model=transcript", f"model.texts={path}", "model.draft=bundled:draft")
    _, ours, ours_totals = decode(*given, sampling, *strategy)
    assert [r.output for r in ours] == [r.output for r in real]
    assert [asdict(r.counters) for r in ours] == [asdict(r.counters) for r in real]
    assert ours_totals.target_rows == totals.target_rows
