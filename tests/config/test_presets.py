"""Every preset composes, alone and with every override that a user may give it."""

from __future__ import annotations

import json
import sys
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
from flat import flat_text

from specdec.config.comparison import compose_comparison
from specdec.config.hydra import compose_config
from specdec.config.job import Job, run_job_of
from specdec.config.options import GROUPS, PARTS, first_comment, flatten, options, own_values
from specdec.errors import UserError

PRESETS = sorted(options("strategy"))
OURS = [name for name in PRESETS if not name.startswith(("hf_", "ort_", "openvino_", "endpoint"))]
RANDOM = ("model=random", "model.num_layers=80")  # without files; layers for every pipeline

KEYS_OF_ALL = {
    "max_new_tokens": 7,
    "seed": 3,
    "prefill_chunk": 64,
    "threads": 1,
    "ignore_eos": True,
    "stop_strings": ["end"],
    "data.limit": 2,
    "model.dtype": "bfloat16",
    "sampling.temperature": 0.7,
    "sampling.top_p": 0.5,
    "sampling.top_k": 4,
    "output_dir": "elsewhere",
}


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_composes_and_is_complete(preset: str) -> None:
    job = job_of(preset)
    assert job.name == preset == job.config["strategy"]["name"]
    assert job.config["strategy"]["title"]
    parts = set(PARTS) & job.config.keys()
    assert parts == (set(PARTS) if preset in OURS else set())
    assert set(job.config["choices"]) == set(GROUPS) - {"strategy"} - (set(PARTS) - parts)
    assert "output_dir" not in job.config


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_every_key_of_the_preset_can_be_overridden(preset: str) -> None:
    """The keys that every run has, and every whole number of the preset's own parts."""
    asked: dict[str, object] = dict(KEYS_OF_ALL)
    if preset in OURS:
        for group in PARTS:
            for key, value in flatten(job_of(preset).config[group]).items():
                if isinstance(value, int) and not isinstance(value, bool):
                    asked[f"{group}.{key}"] = value + 1
    words = [f"{key}={json.dumps(value)}" for key, value in asked.items()]
    job = run_job_of([f"strategy={preset}", *RANDOM, *words])
    found = flatten(job.config)
    assert job.output_dir == asked.pop("output_dir")
    assert {key: found[key] for key in asked} == asked


@cache
def alone(group: str, option: str) -> dict[str, object]:
    """The option's values without any preset."""
    path = options(group)[option]
    if "defaults:" not in path.read_text(encoding="utf-8"):
        return own_values(path)
    return compose_config([f"{group}={option}"]).values[group]


@cache
def job_of(preset: str) -> Job:
    return run_job_of([f"strategy={preset}", *RANDOM])


def test_presets_state_nothing_but_their_choices_and_names() -> None:
    """A preset's own values (SpecPipe's width) stand in an option of the group, policy/specpipe.

    Stated in the preset they would leak into the part that a user puts in place of the preset's.
    """
    for name, path in options("strategy").items():
        assert set(own_values(path)) == {"strategy"}, name


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["specpipe", "mixture"])
def test_a_replaced_part_is_wholly_replaced(preset: str) -> None:
    choices = {group: sorted(options(group)) for group in PARTS}
    for turn in range(max(map(len, choices.values()))):
        chosen = {group: names[turn % len(names)] for group, names in choices.items()}
        words = [f"{group}={option}" for group, option in chosen.items()]
        job = run_job_of([f"strategy={preset}", *RANDOM, *words])
        for group, option in chosen.items():
            assert job.config[group] == alone(group, option)
            assert job.config["choices"][group] == option


@pytest.mark.slow
@pytest.mark.parametrize("group", ["sampling", "clock", "data", "logger"])
def test_every_option_of_a_group_composes(
    group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra = ModuleType("wandb")  # an extra, which need not be installed to compose its option
    extra.__spec__ = ModuleSpec("wandb", None)
    monkeypatch.setitem(sys.modules, "wandb", extra)
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"q": "text"}\n', encoding="utf-8")
    needs = {"jsonl": [f"data.path={file}", "data.field=q"], "text": [f"data.path={file}"]}
    for option in options(group):
        job = run_job_of([*RANDOM, f"{group}={option}", *needs.get(option, [])])
        assert job.config["choices"][group] == option


@pytest.mark.parametrize("name", sorted(options("profile")))
def test_every_profile_crosses_the_door_with_its_costs(name: str) -> None:
    from specdec.clocks import CostCurve

    clock = run_job_of([*RANDOM, "clock=simulated", f"clock.profile={name}"]).config["clock"]
    assert clock["profile"] == name
    assert clock["note"]
    for curve in clock["costs"].values():
        tuples = {k: tuple(v) if isinstance(v, list) else v for k, v in curve.items()}
        assert CostCurve(**tuples)(1) > 0


def test_the_pinned_profile_gives_the_pinned_stage_times() -> None:
    """T(1) = 37.8 ms, T(64) = 48 ms with prune and transfer, 6 ms per 64 more."""
    from specdec.clocks import CostCurve

    costs = run_job_of([*RANDOM, "clock=simulated", "clock.profile=specpipe_8x3090"]).config[
        "clock"
    ]["costs"]
    curve = {
        kind: CostCurve(**{k: tuple(v) if isinstance(v, list) else v for k, v in c.items()})
        for kind, c in costs.items()
    }
    assert curve["stage"](1) + curve["transfer"](1) == pytest.approx(37.8)
    assert curve["stage"](64) + curve["prune"](64) + curve["transfer"](64) == pytest.approx(48.0)
    assert curve["stage"](65) == pytest.approx(48.0)
    assert curve["stage"](128) == pytest.approx(48.0)
    assert curve["draft"](64) == pytest.approx(17.0)


def test_presets_say_what_the_papers_say() -> None:
    assert job_of("specinfer").config["policy"]["branching"] == [1, 1, 3, 1, 1, 1, 1, 1]
    for name, width, stages in (("pipedec", 32, 14), ("specpipe", 64, 8)):
        found = job_of(name).config
        assert (found["policy"]["width"], found["policy"]["children"]) == (width, 16)
        assert found["policy"]["levels_per_step"] == 1
        assert found["executor"]["stages"] == stages
    assert job_of("ar").config["policy"] == {"_target_": "specdec.policies.RootOnly"}


@pytest.mark.slow
def test_default_configuration_has_not_drifted() -> None:
    """A changed default changes everybody's results: it has to be seen in a diff."""
    kept = (Path(__file__).parent / "flat.yaml").read_text(encoding="utf-8")
    assert kept == flat_text(), "run: python tests/config/flat.py > tests/config/flat.yaml"


def test_every_option_says_what_it_is_and_every_key_has_a_comment() -> None:
    for group in GROUPS:
        for path in options(group).values():
            assert first_comment(path), path
            if group == "strategy":
                assert own_values(path)["strategy"]["name"] == path.stem
            for line in path.read_text(encoding="utf-8").splitlines():
                key = line.partition(":")[0].strip()
                told = "#" in line or key in (
                    "_target_", "kind", "defaults", "name", "title", "strategy", "method", "seed",
                    "draft", "cheap", "sources", "inner", "options", "strategy", "children",
                )  # fmt: skip
                assert told or not key or key.startswith("- "), f"{path.name}: {line}"


def test_every_key_of_a_recipe_has_a_comment() -> None:
    """But the shares of named streams and sizes of packages, which say what they are."""
    for path in options("train").values():
        section = ""
        for line in path.read_text(encoding="utf-8").splitlines():
            key = line.partition(":")[0]
            section = section if line.startswith((" ", "#")) else key
            told = "#" in line or section in ("packages", "weights", "distill_weights")
            assert told or not key or line.lstrip().startswith("- "), f"{path.name}: {line}"


class TestCompare:
    def test_rows_are_what_run_would_compose(self) -> None:
        rows = compose_comparison(["strategies=[ar,specpipe,hf_generate]", *RANDOM])
        for job in rows.jobs:
            assert job.config == job_of(job.name).config

    def test_a_key_reaches_the_rows_that_have_it_and_the_rest_is_told(self) -> None:
        rows = compose_comparison(
            ["strategies=[ar,fixed_width,speculative]", *RANDOM, "policy.width=3"]
        )
        by_name = {job.name: job.config for job in rows.jobs}
        assert by_name["fixed_width"]["policy"]["width"] == 3
        assert by_name["speculative"]["policy"] == alone("policy", "chain")
        assert rows.notices == (
            "policy.width=3 does not apply to ar",
            "policy.width=3 does not apply to speculative",
        )

    def test_yardsticks_keep_their_parts(self) -> None:
        """An `ar` row with another source would no longer be what the others are measured by."""
        rows = compose_comparison(
            ["strategies=[ar,hf_generate,staged]", *RANDOM, "source=ngram", "policy=chain"]
        )
        by_name = {job.name: job.config for job in rows.jobs}
        assert by_name["ar"]["source"] == {"_target_": "specdec.sources.NullSource"}
        assert "source" not in by_name["hf_generate"]
        assert by_name["staged"]["source"] == {"_target_": "specdec.sources.NGramSource"}

    @pytest.mark.slow
    def test_stages_put_every_row_on_a_pipeline(self) -> None:
        rows = compose_comparison(
            ["strategies=[ar,specinfer,pipedec]", *RANDOM, "executor.stages=4"]
        )
        for job in rows.jobs:
            assert job.config["executor"]["_target_"] == "specdec.executors.PipelineExecutor"
            assert job.config["executor"]["stages"] == 4

    def test_executor_is_applied_to_every_row(self) -> None:
        rows = compose_comparison(["strategies=[ar,specpipe]", *RANDOM, "executor=local"])
        assert all("stages" not in job.config["executor"] for job in rows.jobs)

    @pytest.mark.parametrize(
        ("overrides", "word"),
        [
            (["strategies=[ar,speculativ]"], "speculative"),
            (["strategies=[ar,ar]"], "twice"),
            (["strategies=[]"], "list"),
            (["strategies=ar"], "list"),
            (["strategy=ar"], "strategies"),
            (["strategies=[ar,staged]", "policy.widht=3"], "none of the rows"),
            (["strategies=[ar]", "policy=chain"], "none of the rows"),
            (["strategies=[ar,staged]", "policy=chian"], "chain"),
            (["strategies=[ar]", "repeats=0"], "repeats"),
            (["strategies=[ar,hf_generate]", "executor.stages=4"], "hf_generate"),
            (["strategies=[ar,hf_generate]", "clock=simulated"], "hf_generate"),
        ],
    )
    def test_what_cannot_be_compared_is_refused(self, overrides: list[str], word: str) -> None:
        with pytest.raises(UserError, match=word):
            compose_comparison([*RANDOM, *overrides])
