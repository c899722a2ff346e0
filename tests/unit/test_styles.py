"""One style per strategy: the same in every figure, distinct within one, for every reader."""

import pytest

from specdec.config.options import options
from specdec.report.styles import COLORS, PRESETS, row_styles


def test_every_preset_has_a_style_of_its_own() -> None:
    assert set(PRESETS) == set(options("strategy", ())), "add the preset to styles._PRESETS"
    assert len(set(PRESETS.values())) == len(PRESETS)


def test_a_strategy_looks_the_same_in_any_figure() -> None:
    alone = row_styles(["specpipe"])["specpipe"]
    assert row_styles(["own", "ar", "pearl", "specpipe"])["specpipe"] == alone
    assert row_styles({"lr=3/specpipe": "specpipe"})["lr=3/specpipe"] == alone
    assert row_styles(["own"])["own"] == row_styles(["ar", "own"])["own"]


@pytest.mark.parametrize("num", [2, 10, 11, 47])
def test_rows_of_a_figure_are_distinct(num: int) -> None:
    """Colours first; forms only where the colours are used up."""
    sweep = row_styles({f"policy.gamma={i}": "speculative" for i in range(num)})
    assert len(set(sweep.values())) == num
    assert len({style.color for style in sweep.values()}) == min(num, len(COLORS))
    assert sweep["policy.gamma=0"] == PRESETS["speculative"]
    everything = row_styles([*PRESETS, *(f"own{i}" for i in range(num))])
    assert len(set(everything.values())) == len(PRESETS) + num
