"""One style per strategy: the same in every figure, distinct within one, for every reader."""

from __future__ import annotations

from itertools import combinations

import matplotlib.axes
import numpy as np
import pytest

from specdec.config.options import options
from specdec.report.plots import comparison_png
from specdec.report.styles import COLORS, GREY, PRESETS, row_styles

# Machado, Oliveira and Fernandes 2009, severity 1; on linear sRGB.
VISION = {
    "normal": np.eye(3),
    "protanopia": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deuteranopia": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
WHITE = np.array([0.95047, 1.0, 1.08883])
LEAST = 18.0  # CIE76; just noticeable is 2.3


def linear(color: str) -> np.ndarray:
    channels = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    """CIELAB of linear sRGB."""
    scaled = XYZ @ rgb.clip(0.0, 1.0) / WHITE
    x, y, z = np.where(scaled > 0.008856, np.cbrt(scaled), 7.787 * scaled + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def nearest(colors: tuple[str, ...]) -> float:
    """The least distance of two colours for any of the three kinds of vision."""
    return min(
        float(np.linalg.norm(lab(see @ linear(one)) - lab(see @ linear(other))))
        for see in VISION.values()
        for one, other in combinations(colors, 2)
    )


def contrast(color: str) -> float:
    """WCAG's contrast with white paper."""
    return 1.05 / (float((XYZ @ linear(color))[1]) + 0.05)


def test_colours_stay_apart_for_colour_blind_readers() -> None:
    assert nearest((GREY, *COLORS)) > LEAST


def test_the_measure_finds_colours_that_do_not() -> None:
    """Control: a teal and a pink that differ clearly for most readers only."""
    pair = ("#3a9e9e", "#c45c9c")
    assert nearest(pair) < 2.3
    assert np.linalg.norm(lab(linear(pair[0])) - lab(linear(pair[1]))) > 50


def test_colours_can_be_seen_on_white() -> None:
    assert min(map(contrast, (GREY, *COLORS))) > 2.0


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


def test_the_comparison_draws_them(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []
    plain = matplotlib.axes.Axes.barh

    def barh(self: matplotlib.axes.Axes, *args: object, **keys: object) -> object:
        drawn.append(str(keys["color"]))
        return plain(self, *args, **keys)

    monkeypatch.setattr(matplotlib.axes.Axes, "barh", barh)
    rows = [{"strategy": name, "tokens_per_s": 1.0} for name in ("ar", "own", "specinfer")]
    comparison_png(rows, {})
    assert drawn == [row_styles(["ar", "own", "specinfer"])[row["strategy"]].color for row in rows]
