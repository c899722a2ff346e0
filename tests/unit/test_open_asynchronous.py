"""The comparison of asynchronous methods: its cases, settings, hits and generated sentences."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from experiments.open import asynchronous_text
from experiments.open.asynchronous_cases import Case, hits_of, numbers
from experiments.open.asynchronous_text import along, duel, leaders
from experiments.reproduce.items import all_items
from specdec.pairs import build_pair

ITEM = all_items()["open/asynchronous"]
CONFIG = ITEM.config


def case(**changes: Any) -> Case:
    base = {"layout": "group", "hits": "synthetic", **CONFIG["base"]}
    return Case(**{**base, **changes})


@pytest.mark.parametrize(
    ("ratio", "stages", "wanted"),
    [
        (10, 1, {"per_step": 10, "levels": 6}),
        (5, 4, {"per_step": 1, "levels": 1}),
        (40, 4, {"per_step": 10, "levels": 6}),
    ],
)
def test_settings_follow_from_the_ratio(ratio: int, stages: int, wanted: dict[str, int]) -> None:
    found = numbers(CONFIG["law"], case(ratio=ratio), stages)
    assert found["stages"] == stages
    assert {name: found[name] for name in wanted} == wanted


def test_the_serial_chain_has_the_best_length_of_its_law() -> None:
    speeds = [(1 - 0.8 ** (g + 1)) / 0.2 / (1 + g / 10) for g in range(1, 13)]
    assert numbers(CONFIG["law"], case(), 1)["chain"] == 1 + int(np.argmax(speeds))


@pytest.mark.parametrize("acceptance", [0.6, 0.8, 0.95])
def test_hits_have_the_mean_acceptance_of_their_case(acceptance: float) -> None:
    words = dict(word.partition("=")[::2] for word in hits_of(CONFIG["law"], acceptance))
    values = {
        key.removeprefix("model."): [float(v) for v in text.strip("[]").split(",")]
        for key, text in words.items()
        if key.startswith("model.")
    }
    assert np.dot(values["weights"], values["top1"]) == pytest.approx(acceptance)
    build_pair({"kind": "synthetic", "vocab_size": 4096, **values})  # a law that is accepted


# Sentences.


def speeds_of(ratios: dict[Case, tuple[float, float, float]]) -> Any:
    """Two methods per case whose speed ratio is the given (value, low, high)."""
    return {
        c: {
            "ssd": SimpleNamespace(value=ratio[0], per_device=ratio[0] / 2, run=ratio),
            "speculative": SimpleNamespace(value=1.0, per_device=1.0, run=None),
        }
        for c, ratio in ratios.items()
    }


@pytest.fixture
def _ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run is its own ratio to the other."""
    monkeypatch.setattr(asynchronous_text, "speed_ratio", lambda fast, slow: fast)


@pytest.mark.usefixtures("_ratios")
def test_a_duel_names_where_it_is_won_lost_and_open() -> None:
    won, lost, still = (1.2, 1.1, 1.3), (0.8, 0.7, 0.9), (1.05, 0.9, 1.2)
    grid = {
        case(ratio=5, acceptance=0.6): lost,
        case(ratio=5, acceptance=0.8): lost,
        case(ratio=10, acceptance=0.6): still,
        case(ratio=10, acceptance=0.8): won,
        case(ratio=20, acceptance=0.6): won,
        case(ratio=20, acceptance=0.8): (1.5, 1.4, 1.6),
        case(ratio=20, acceptance=0.8, link_ms=20.0): lost,  # not on the grid
    }
    text = duel(CONFIG, speeds_of(grid), "ssd", "speculative", "one", "two", "group")
    assert text == (
        "One (ssd) beats two (speculative), the target as one group: with t_target/t_draft of 5 at"
        " no acceptance (slower at 0.6, 0.8); with 10 at acceptance 0.8 (open at 0.6); with 20 at"
        " every acceptance. It is 0.80x (0.70 to 0.90) to 1.50x (1.40 to 1.60) as fast."
    )


@pytest.mark.usefixtures("_ratios")
def test_an_axis_compares_the_best_of_each_kind() -> None:
    points = {case(): (1.5, 1.4, 1.6), case(link_ms=20.0): (1.1, 0.9, 1.2)}
    text = along(CONFIG, speeds_of(points), "group", "link_ms")
    assert "at a link of 0.05 ms ssd is 1.50x (1.40 to 1.60) as fast as speculative" in text
    assert "at a link of 20 ms ssd is 1.10x (0.90 to 1.20) as fast as speculative" in text
    assert along(CONFIG, speeds_of(points), "pipeline", "link_ms") == ""


def test_leaders_are_counted_by_speed_and_per_device() -> None:
    points = {case(acceptance=a): (v, v, v) for a, v in ((0.6, 0.9), (0.8, 1.5), (0.9, 2.5))}
    text = leaders(CONFIG, speeds_of(points), "group")
    assert "fastest: ssd in 2 of 3 cases (t_target/t_draft 10, acceptance 0.8, 0.9)" in text
    assert "most per device: speculative in 2 of 3 cases" in text
