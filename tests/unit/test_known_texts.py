"""A target that writes known texts: the counts of a run are those of the real target."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments.drafters import known_texts
from experiments.drafters.measure import Runs, Target, parsed, parser
from tests.sampled import sampled

PROFILE = "clock.profile=uniform_30ms"
CELLS = {
    "levels": ("hit rate", "strategy=specpipe", "executor.stages=8", "source=eagle"),
    "levels, early": (
        *("hit rate", "strategy=specpipe", "executor.stages=16"),
        *("source=eagle", "source.early=true"),
    ),
    "best first, early": (
        *("hit rate", "strategy=specpipe_bf", "executor.stages=16"),
        *("source=eagle", "source.early=true"),
    ),
    "two groups": ("tokens per pass", "strategy=swiftspec", "source=eagle"),
    "one device": ("tokens per pass", "strategy=medusa"),
}


def small_runs(folder: Path) -> Runs:
    words = ["--data", "stdlib", "--prompts", "2", "--tokens", "8", f"--out={folder}"]
    args: argparse.Namespace = parsed(parser("Counts.", "m"), words)
    return Runs(args)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return small_runs(tmp_path_factory.mktemp("runs"))


@pytest.mark.slow
@pytest.mark.parametrize("cell", sampled(CELLS, every=2))
def test_counts_are_those_of_the_real_target(cell: str, runs: Runs) -> None:
    measure, *overrides = CELLS[cell]
    width = ("policy.width=8",) if measure == "hit rate" else ()
    targets: tuple[Target, ...] = ("texts", "real")
    found = [runs.counted(*overrides, *width, PROFILE, target=target) for target in targets]
    known, real = ([(r.output, r.counters) for r in one.results] for one in found)
    assert known == real
    assert sum(len(output) for output, _ in known) >= 8


def test_states_of_nodes_beside_the_text_are_those_of_a_fresh_pass() -> None:
    """In any order of the requests, and with their ancestors left out."""
    from specdec.pairs import PretrainedPair
    from specdec.types import HiddenName

    pair = PretrainedPair(target="bundled:target")
    text = known_texts.KnownText(np.arange(10, 30))
    known = known_texts.KnownTexts(pair, {0: text})
    known.stage(0, 24, None, capture=(HiddenName(11), HiddenName(20)))  # type: ignore[arg-type]
    states = text.states(known.target_runner())
    keys = [(5, 700, 701), (7, 90), (5, 700), (5, 702)]
    for key, found in zip(keys, states.beside(keys), strict=True):
        path = np.concatenate([text.tokens[: key[0] + 1], key[1:]])
        fresh = known_texts.KnownText(path).states(known.target_runner()).on_text
        for name, state in found.items():
            torch.testing.assert_close(state, fresh[name][-1], atol=1e-4, rtol=1e-4)
