"""``specdec plan``: inputs, search, answer, and the check against a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import specdec
from specdec.cli.main import main
from specdec.config.job import run_job_of
from specdec.errors import UserError
from specdec.fitting import HitLaw
from specdec.metrics.speedup import expected_accepted
from specdec.planning import check_run, units_of_run
from specdec.planning.acceptance import OfLaw, OfRecord, chain_table
from specdec.planning.asked import planning_of
from specdec.planning.chains import chain_cell, crossover, round_ms
from specdec.planning.layouts import Layout, layouts
from specdec.planning.machines import DoesNotFit, machine_of
from specdec.planning.options import PlanOptions, split_words
from specdec.planning.search import Times, effective, interval
from specdec.planning.sensitivity import Change, sentences_of_changes
from specdec.runs.jobs import run_job

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


class _Silent:
    def phase(self, label: str, total: int | None) -> None: ...

    def advance(self, count: int = 1, detail: str = "") -> None: ...

    def note(self, text: str) -> None: ...


@pytest.fixture
def machine_file(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(MACHINE)
    return path


def options(**keys: Any) -> PlanOptions:
    return split_words([], keys)[0]


# Inputs


def test_own_keys_are_split_from_the_configuration() -> None:
    words = ["batch=1,4,16", "context=512,8k", "devices=8", "link_ms=0.2", "data=stdlib"]
    chosen, rest = split_words(words)
    assert (chosen.batch, chosen.context) == ((1, 4, 16), (512, 8192))
    assert (chosen.devices, chosen.link_ms, rest) == (8, 0.2, ["data=stdlib"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "needs the times of a machine"),
        (["profile=uniform_30ms"], "how many stages"),
        (["batch=0"], "batch"),
        (["devices=none_at_all"], "devices"),
        (["objective=speed"], "objective"),
        (["profile=nowhere"], "neither a profile nor"),
        (["strategies=[specpype]", "profile=specpipe_8x3090"], "specpipe"),
        (["strategy=ar"], "a plan chooses the strategy"),
        (["clock=simulated"], "profile="),
        (["policy.gamma=3"], "a plan chooses the sizes"),
        (["profile=measured"], "a law or record has none"),
        (["check=true", "profile=specpipe_8x3090"], "check=DIR"),
        (["check=nowhere", "profile=specpipe_8x3090"], "no summary.json"),
        (["check=nowhere", "batch=4", "profile=specpipe_8x3090"], "one request at a time"),
        (["acceptance=nowhere.jsonl"], "nowhere.jsonl"),
        (["model.nothing=3"], "nothing"),
        (["profile=specpipe_8x3090", "link_gb_s=10"], "described machine"),
        (["profile=swiftspec_table1"], "llama-3.2-1b"),
    ],
)
def test_bad_input_is_refused_in_one_line(words: list[str], told: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        specdec.plan([LAW, *words], budget_s=1.0, output_dir=tmp_path)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (MACHINE.replace("tflops", "teraflops"), "teraflops"),
        (MACHINE.replace("tflops: 180\n", ""), "without tflops"),
        (MACHINE.replace("180", "-1"), "tflops"),
        (MACHINE + "boxes: 3\n", "equal boxes"),
    ],
)
def test_bad_descriptions_are_refused(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=told):
        machine_of(options(profile=str(path)))


def test_a_machine_without_room_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(MACHINE.replace("memory_gb: 48", "memory_gb: 4"))
    with pytest.raises(UserError, match="plain decoding does not fit"):
        specdec.plan([LAW], profile=str(path), strategies=["speculative"])


# Machines


def test_layouts_use_all_devices() -> None:
    found = list(layouts(8, own_draft=True, staged=True, copies=False))
    assert all(layout.devices <= 8 for layout in found)
    assert Layout(stages=7, own_draft=True) in found
    assert Layout(stages=1, degree=4, draft_degree=4, own_draft=True) in found
    assert {c.replicas for c in layouts(5, own_draft=True, staged=False, copies=True)} == {2, 3, 4}


def test_a_described_machine_is_a_roofline(machine_file: Path) -> None:
    machine = machine_of(options(profile=str(machine_file)))
    whole, half = (machine.costs(Layout(stages=s), 1, 512)["stage"]["ms"] for s in (2, 4))
    assert half[0] == pytest.approx(whole[0] / 2)
    assert whole[0] * 2 > 70.0 / 900.0 * 1e3, "weights are read once per pass"
    assert whole == sorted(whole)
    assert whole[-1] > 4 * whole[0], "large passes are bound by arithmetic"
    with pytest.raises(DoesNotFit, match="GB on a device"):
        machine.costs(Layout(), 1, 512)
    assert machine.memory_gb(Layout(stages=4), 1, 512) == pytest.approx(70 / 4 + 2.5)
    assert machine.memory_gb(Layout(stages=2, own_draft=True), 1, 512) == pytest.approx(35.0)


def test_context_is_priced_where_the_description_has_its_bytes(machine_file: Path) -> None:
    machine_file.write_text(MACHINE + "kv_kb: 320\n")
    machine = machine_of(options(profile=str(machine_file)))
    short, long = (machine.costs(Layout(stages=4), 4, c)["stage"]["ms"][0] for c in (512, 8192))
    assert long > short
    assert machine.prices_context
    grown = 4 * (8192 - 512) * 320e-6 / 4
    more = machine.memory_gb(Layout(stages=4), 4, 8192)
    less = machine.memory_gb(Layout(stages=4), 4, 512)
    assert more is not None
    assert less is not None
    assert more - less == pytest.approx(grown)


def test_a_profile_is_scaled_to_other_stages() -> None:
    machine = machine_of(options(profile="specpipe_8x3090", devices=17))
    eight, sixteen = (machine.costs(Layout(stages=s), 1, 1)["stage"]["ms"][0] for s in (8, 16))
    assert (eight, sixteen) == (36.8, 18.4)
    with pytest.raises(DoesNotFit, match="not to hold it"):
        machine.costs(Layout(stages=4), 1, 1)


# Acceptance


def test_tokens_per_pass_of_a_constant_law_are_the_formula() -> None:
    section = {"weights": [1.0], "top1": [0.8], "decay": [2.0], "miss": [0.0]}
    acceptance = OfLaw.of(section)
    for gamma, tokens in enumerate(chain_table(acceptance)):
        assert tokens == pytest.approx(1.0 + expected_accepted(0.8, gamma))


def test_shifted_laws_and_records_have_the_hit_rate_that_is_asked_for() -> None:
    section = {"weights": [0.5, 0.5], "top1": [0.9, 0.4], "decay": [2.0, 2.0], "miss": [0.0, 0.0]}
    assert isinstance(OfLaw.of(section).law, HitLaw)
    moved = OfLaw.of(section).shifted(-3.0)
    expected = np.mean([1 / (1 + np.exp(3.0) * (1 - p) / p) for p in (0.9, 0.4)])
    assert moved.hit_rate() == pytest.approx(expected)
    moved.pair()  # whose candidates are still in the order of their probability
    record = OfRecord.of("bundled:humaneval")
    for odds in (-1.0, 1.0):
        rate = record.hit_rate()
        expected = 1 / (1 + np.exp(-odds) * (1 - rate) / rate)
        assert record.shifted(odds).hit_rate() == pytest.approx(expected, abs=0.03)


# Search


def test_intervals_count_the_requests_of_a_law() -> None:
    assert effective(24, 0, True) == 24
    assert effective(24, 24, True) == 12
    assert effective(24, 24, False) == 24
    rng = np.random.default_rng(1)
    times = Times(rng.normal(1.0, 0.1, 24), np.ones(24))
    low, high = interval(times.resampled(24))
    wide_low, wide_high = interval(times.resampled(6))
    assert wide_high - wide_low == pytest.approx(2 * (high - low), rel=0.15)
    covered = 0
    for seed in range(200):  # 95 % intervals: 8 or fewer of 200 misses less than 1 in 10^4 ... 24
        drawn = Times(np.random.default_rng(seed).normal(1.0, 0.1, 24), np.ones(24))
        low, high = interval(drawn.resampled(24))
        covered += low <= 1.0 <= high
    assert 176 <= covered <= 199


def test_the_chain_table_crosses_over_to_plain_decoding(machine_file: Path) -> None:
    machine = machine_of(options(profile=str(machine_file)))
    table = chain_table(OfLaw.of({"weights": [1], "top1": [0.6], "decay": [2], "miss": [0]}))
    one = chain_cell(machine, table, 1, 512)
    start = crossover(machine, table, 512)
    assert one is not None
    assert one.draft_tokens > 0
    assert start is not None
    at, before = (chain_cell(machine, table, b, 512) for b in (start, start // 2))
    assert at is not None
    assert before is not None
    assert at.draft_tokens == 0 < before.draft_tokens
    costs = machine.costs(one.layout, 1, 512)
    seconds = 1e-3 * round_ms(costs, one.layout, 1, one.draft_tokens)
    assert one.tokens_per_s == pytest.approx(table[one.draft_tokens] / seconds)


def test_changes_name_the_nearest_value() -> None:
    def change(value: float, name: str) -> Change:
        return Change(what="acceptance", value=value, told=name, name=name, seconds=1.0)

    found = [change(0.3, "b"), change(0.5, "b"), change(0.6, "a"), change(0.9, "a")]
    (told,) = sentences_of_changes(found, "a", 0.7)
    assert told == "hit rate: b is first at 0.50 (not at 0.60) (tried 0.30 to 0.90)"
    (told,) = sentences_of_changes(found[2:], "a", 0.7)
    assert "a stays first from 0.60 to 0.90" in told


# Whole plans


SMALL = {"strategies": ["speculative"], "prompts": 4}


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[specdec.planning.Plan, Path]:
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
    assert "num_speculative_tokens" in plan.engines["vLLM"]
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
    assert verdict.agrees, verdict.figures


def run_planned(out: Path, folder: Path, *words: str) -> None:
    base = ["strategy=planned", "clock=simulated", "data.limit=6", "max_new_tokens=64"]
    given = any(word.startswith("model=") for word in words)
    model = () if given else (LAW, "model.draft_name=null")
    job = run_job_of([*base, *model, "model.seed=1", *words], [out])
    run_job(job.config, folder, _Silent())


def test_a_wrong_profile_is_named(planned: Any, tmp_path: Path) -> None:
    """The first real run has stages that are twice as slow as planned."""
    plan, folder = planned
    text = (folder / "out" / "profile" / "planned.yaml").read_text()
    lines = [slower(line) if "stage: {" in line else line for line in text.splitlines()]
    slow = tmp_path / "slow.yaml"
    slow.write_text("\n".join(lines))
    run_planned(folder / "out", tmp_path / "run", f"clock.profile={slow}")
    verdict = check_run(plan.expected, units_of_run(tmp_path / "run"))
    assert not verdict.agrees
    assert "times disagree with the profile" in verdict.warnings[0]
    assert not any("acceptance" in warning for warning in verdict.warnings)


def slower(line: str) -> str:
    head, _, ms = line.partition("ms: [")
    values, end, rest = ms.partition("]")
    doubled = ", ".join(str(2.0 * float(value)) for value in values.split(","))
    return f"{head}ms: [{doubled}{end}{rest}"


def test_a_wrong_law_is_named(planned: Any, tmp_path: Path) -> None:
    """The first real run has a draft that is right at 45 % of the positions."""
    plan, folder = planned
    law = ["model=synthetic", "model.weights=[1.0]", "model.top1=[0.45]", "model.decay=[2.0]"]
    words = [*law, "model.miss=[0.0]", "clock.profile=planned"]
    run_planned(folder / "out", tmp_path, *words)
    verdict = check_run(plan.expected, units_of_run(tmp_path))
    assert "acceptance disagrees with the law" in verdict.warnings[0]


@pytest.mark.slow
def test_the_same_seed_gives_the_same_plan(planned: Any, machine_file: Path) -> None:
    plan, folder = planned
    again = specdec.plan([LAW], profile=str(folder / "cluster.yaml"), **SMALL)
    assert again.choices == plan.choices
    assert again.decides == plan.decides


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


def test_a_spent_budget_is_told(machine_file: Path) -> None:
    plan = specdec.plan(
        [LAW], profile=str(machine_file), strategies=["speculative", "specpipe"], budget_s=0.3
    )
    assert not plan.complete
    assert any("budget" in note for note in plan.notes)


def test_the_log_of_an_engine_is_an_input(tmp_path: Path) -> None:
    """Accepted lengths of a draft that is right at 70 % of the positions, in passes of 5."""
    rng = np.random.default_rng(0)
    hits = rng.random((12, 200, 5)) < 0.7
    lengths = 1 + np.cumprod(hits, axis=2).sum(axis=2)
    path = tmp_path / "log.json"
    path.write_text(json.dumps(lengths.tolist()))
    asked = planning_of([f"acceptance={path}", "draft_tokens=5", "profile=specpipe_8x3090"])
    assert asked.acceptance is not None
    assert asked.acceptance.requests == 12
    assert asked.acceptance.hit_rate() == pytest.approx(0.7, abs=0.03)  # 5 standard errors
    expected = 1.0 + expected_accepted(0.7, 5)
    assert asked.acceptance.tokens_per_pass(5) == pytest.approx(expected, rel=0.05)


@pytest.mark.slow
def test_models_are_recorded_and_measured(tmp_path: Path) -> None:
    """One device: a record, a profile of this machine, and the controller's own time."""
    pair = ["model=random", "model.num_layers=4", "model.hidden_size=32", "max_new_tokens=24"]
    words = [*pair, "data.limit=4", "threads=1"]
    small = {"strategies": ["speculative"], "prompts": 4, "profile": "measured"}
    plan = specdec.plan(words, output_dir=tmp_path, **small)
    assert {choice.strategy for choice in plan.choices} == {"ar", "speculative"}
    assert "record of 4 prompts" in plan.acceptance
    profile = (tmp_path / "profile" / "planned.yaml").read_text()
    assert "ms of the controller per target pass" in profile
    assert (tmp_path / "record" / "record.npz").is_file()


@pytest.mark.slow
def test_the_command(machine_file: Path, tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "out"
    words = ["plan", LAW, f"profile={machine_file}", "strategies=[speculative]", "prompts=4"]
    assert main([*words, f"output_dir={folder}"]) == 0
    first = capsys.readouterr().out
    assert "tokens/s (95 %)" in first
    assert f"--config-dir {folder} strategy=planned" in first
    run_planned(folder, tmp_path / "run", "clock.profile=planned")
    capsys.readouterr()
    assert main([*words, f"output_dir={folder}", f"check={tmp_path / 'run'}"]) == 0
    second = capsys.readouterr().out
    assert "complete already" in second
    assert "check: ms per token" in second
    assert "WARNING" not in second
    assert main([*words[:-1], "prompts=5", f"output_dir={folder}"]) == 2
    assert main(["plan", "--help"]) == 0
