"""Whole plans: search, answer, files, the check against a run, and the command."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import specdec
from specdec.config.job import run_job_of
from specdec.planning import Plan, check_run, units_of_run
from specdec.runs.jobs import run_job
from specdec.runs.progress import Progress

pytestmark = pytest.mark.slow

LAW = "model=law_pipespec_1b_70b"
MACHINE = """\
devices: 4
memory_gb_s: 900
tflops: 180
memory_gb: 48
link_ms: 0.05
link_gb_s: 25
target_gb: 70
draft_gb: 2.5
"""


SMALL = {"strategies": ["speculative"], "prompts": 4}


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, Path]:
    folder = tmp_path_factory.mktemp("plan")
    path = folder / "cluster.yaml"
    path.write_text(MACHINE.replace("draft_gb: 2.5", "draft_gb: 0.5"))
    made = specdec.plan([LAW], profile=str(path), output_dir=folder / "out", **SMALL)
    return made, folder


def test_a_plan_of_a_machine_of_eight_lines(planned: Any) -> None:
    plan, folder = planned
    assert MACHINE.count("\n") == 8
    names = {choice.strategy for choice in plan.choices}
    assert names == {"ar", "speculative"}
    speeds = [choice.tokens_per_s for choice in plan.choices]
    assert speeds == sorted(speeds, reverse=True)
    assert list(plan.frame.tokens_per_s) == speeds
    for choice in plan.choices:
        low, high = choice.tokens_per_s_interval
        assert low <= choice.tokens_per_s <= high
        assert choice.memory_gb is not None
        assert choice.memory_gb <= 48
        assert choice.devices <= 4
    plain = next(c for c in plan.choices if c.strategy == "ar")
    assert plain.gain == 1.0
    assert sum(choice.first for choice in plan.choices) == pytest.approx(1.0)
    written = json.loads((folder / "out" / "plan.json").read_text())
    assert written["choices"][0]["strategy"] == plan.best.strategy
    text = (folder / "out" / "plan.txt").read_text()
    assert plan.best.strategy in text
    assert len(text.splitlines()) <= 26


def test_the_written_preset_runs_as_planned(planned: Any, tmp_path: Path) -> None:
    """Under the same law and profile: inside the plan's own interval."""
    plan, folder = planned
    run_planned(folder / "out", tmp_path, "clock.profile=planned")
    verdict = check_run(plan.expected, units_of_run(tmp_path))
    assert not verdict.warnings, verdict.figures


def test_a_model_without_a_draft_is_measured(tmp_path: Path) -> None:
    """Presets that draft from the text."""
    words = ["model=hf", "model.target=bundled:target", "data=stdlib", "data.limit=1"]
    plan = specdec.plan(words, output_dir=tmp_path, prompts=4, budget_s=60)
    assert {choice.strategy for choice in plan.choices} == {"ar", "suffix", "prompt_lookup"}
    tokens = {choice.strategy: choice.tokens_per_answer for choice in plan.choices}
    assert tokens["ar"] == 1.0 < min(tokens["suffix"], tokens["prompt_lookup"])
    assert run_job_of([*words, "strategy=planned"], [tmp_path]).name == "planned"


def run_planned(out: Path, folder: Path, *words: str) -> None:
    base = ["strategy=planned", "clock=simulated", "data.limit=6", "max_new_tokens=64"]
    given = any(word.startswith("model=") for word in words)
    model = () if given else (LAW, "model.draft_name=null")
    job = run_job_of([*base, *model, "model.seed=1", *words], [out])
    run_job(job.config, folder, Progress())


def test_a_wrong_profile_is_named(planned: Any, tmp_path: Path) -> None:
    """The first real run has stages that are twice as slow as planned."""
    plan, folder = planned
    profile = yaml.safe_load((folder / "out" / "profile" / "planned.yaml").read_text())
    stage = profile["costs"]["stage"]
    stage["ms"] = [2.0 * ms for ms in stage["ms"]]
    slow = tmp_path / "slow.yaml"
    slow.write_text(yaml.safe_dump(profile))
    run_planned(folder / "out", tmp_path / "run", f"clock.profile={slow}")
    verdict = check_run(plan.expected, units_of_run(tmp_path / "run"))
    assert "times disagree with the profile" in verdict.warnings[0]
    assert not any("acceptance" in warning for warning in verdict.warnings)


def test_a_wrong_law_is_named(planned: Any, tmp_path: Path) -> None:
    """The first real run has a draft that is right at 45 % of the positions."""
    plan, folder = planned
    law = ["model=synthetic", "model.weights=[1.0]", "model.top1=[0.45]", "model.decay=[2.0]"]
    words = [*law, "model.miss=[0.0]", "clock.profile=planned"]
    run_planned(folder / "out", tmp_path, *words)
    verdict = check_run(plan.expected, units_of_run(tmp_path))
    assert "acceptance disagrees with the law" in verdict.warnings[0]


def test_an_interrupted_plan_continues(planned: Any, tmp_path: Path) -> None:
    """With half of the evaluations on disk and a cut line, the answer is the same."""
    plan, folder = planned
    whole = (folder / "out" / "evaluations.jsonl").read_text().splitlines()
    kept = whole[: len(whole) // 2]
    (tmp_path / "evaluations.jsonl").write_text("\n".join([*kept, whole[len(kept)][:20]]) + "\n")
    words = {"profile": str(folder / "cluster.yaml"), **SMALL}
    again = specdec.plan([LAW], output_dir=tmp_path, **words)
    assert again.choices == plan.choices
    assert 0 < again.simulated_tokens < plan.simulated_tokens


def test_models_are_recorded_and_measured(tmp_path: Path) -> None:
    """One device: a record, and a profile of this machine that runs of the candidates correct."""
    pair = ["model=random", "model.num_layers=2", "model.hidden_size=32", "max_new_tokens=8"]
    words = [*pair, "data.limit=4", "threads=1"]
    small = {"strategies": ["speculative"], "prompts": 4, "profile": "measured"}
    plan = specdec.plan(words, output_dir=tmp_path, **small)
    assert {choice.strategy for choice in plan.choices} == {"ar", "speculative"}
    assert "record of 4 prompts" in plan.acceptance
    assert "measured here" in (tmp_path / "profile" / "planned.yaml").read_text()
    assert (tmp_path / "record" / "record.npz").is_file()
