"""Every preset composes, alone and with every override that a user may give it."""

import json
from functools import cache

import pytest

from specdec.config.job import Job, compose_comparison, run_job_of
from specdec.config.options import PARTS, options, own_values
from specdec.files import flatten

PRESETS = sorted(options("strategy"))
BASELINES = ("hf_", "ort_", "openvino_", "llamacpp_", "endpoint")
OURS = [name for name in PRESETS if not name.startswith(BASELINES)]
RANDOM = ("model=random", "model.num_layers=80", "model.middle_layers=2")  # for every pipeline

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


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS[::6])
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
def job_of(preset: str) -> Job:
    return run_job_of([f"strategy={preset}", *RANDOM])


def test_presets_state_nothing_but_their_choices_and_names() -> None:
    """A preset's own values (SpecPipe's width) stand in an option of the group, policy/specpipe.

    Stated in the preset they would leak into the part that a user puts in place of the preset's.
    """
    for name, path in options("strategy").items():
        assert set(own_values(path)) == {"strategy"}, name


def test_a_mixture_drafts_with_the_head_of_a_target_without_a_draft() -> None:
    def members(*words: str) -> list[str]:
        job = run_job_of(["strategy=adaptive", *words])
        assert bool(job.notices) == bool(words)
        return [str(s["_target_"]).rpartition(".")[2] for s in job.config["source"]["sources"]]

    assert members() == ["SuffixSource", "DraftModelSource"]
    assert members("model.draft=null") == ["SuffixSource", "EagleSource"]


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
        assert by_name["speculative"]["policy"] == job_of("speculative").config["policy"]
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
