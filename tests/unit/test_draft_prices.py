"""A law's hits take the time of its own draft, and profiles say where their figures are from."""

import pytest
import yaml

from specdec.config.job import run_job_of
from specdec.config.options import options
from specdec.config.profiles import load_profile

CLOCK = ["clock=simulated", "clock.profile=specpipe_8x3090"]
LAWS = sorted(name for name in options("model") if name.startswith("law_"))


def draft_ms(*words: str) -> list[float]:
    clock = run_job_of([*words, *CLOCK]).config["clock"]
    assert not {"draft_name", "drafts"} & clock.keys()
    ms: list[float] = clock["costs"]["draft"]["ms"]
    return ms


def test_hits_take_their_own_draft_s_time() -> None:
    """SpecPipe 3.3.1: 17 ms for the 1B draft, 67 ms for the 8B draft."""
    assert draft_ms("model=law_pipespec_1b_70b") == [17.0, 17.0]
    assert draft_ms("model=law_pipespec_8b_70b") == [67.0, 67.0]


def test_free_drafting_fits_every_draft() -> None:
    words = ["clock=simulated", "clock.profile=uniform_30ms"]
    assert (
        "draft" not in run_job_of(["model=law_specbench_68m_7b", *words]).config["clock"]["costs"]
    )


@pytest.mark.parametrize("name", LAWS)
def test_shipped_laws_say_where_they_are_from(name: str) -> None:
    text = options("model")[name].read_text()
    values = yaml.safe_load(text)
    assert values["draft_name"]
    assert "licence of the data:" in text
    assert f"name={name}" in text  # the command that fitted it
    words = ["clock=simulated", "clock.profile=uniform_30ms", "strategy=ar"]
    assert run_job_of([f"model={name}", *words]).config["model"]["origin"] == values["origin"]


@pytest.mark.parametrize("name", sorted(options("profile")))
def test_every_figure_of_a_profile_has_an_origin(name: str) -> None:
    profile = load_profile(name)
    assert "Figures: " in profile["note"]
