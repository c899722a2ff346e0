"""Every preset emits the tokens that were recorded, and is composed to the same configuration.

The suite runs a quarter of the runs, another one for each preset; the rest is exhaustive.
"""

from collections.abc import Callable

import pytest

from tests.matrix.record_presets import presets
from tests.matrix.record_tokens import COMMAND, RUNS, Run, configs, outcome, read, references
from tests.sampled import sampled

PARTS = 4


def compare(preset: str, runs: list[Run]) -> None:
    recorded, lines = read(), []
    for run in runs:
        before = recorded["runs"][preset][str(run)]
        now = outcome(preset, run, recorded["references"])
        if before != now:
            lines.append(f"{run}: recorded {before}, now {now}")
    if lines:
        head = f"{preset}: other tokens; greedy ones never change, for sampled ones see `{COMMAND}`"
        pytest.fail("\n".join([head, *lines]), pytrace=False)


@pytest.mark.slow
@pytest.mark.parametrize("part", sampled(range(PARTS), every=PARTS))
@pytest.mark.parametrize(("at", "preset"), [*enumerate(presets())])
def test_tokens_are_those_recorded(preset: str, at: int, part: int) -> None:
    runs = [run for run in RUNS if not run.processes]
    compare(preset, runs[(part + at) % PARTS :: PARTS])


@pytest.mark.distributed
@pytest.mark.parametrize("preset", sampled(presets(), every=12))
def test_tokens_over_processes(preset: str, keep_ranks: Callable[..., None]) -> None:
    keep_ranks()
    compare(preset, [run for run in RUNS if run.processes])


@pytest.mark.slow
def test_plain_decoding_emits_the_references() -> None:
    assert references(["greedy"]).items() <= read()["references"].items()
    assert references(["t06"]).items() <= read()["references"].items(), COMMAND


@pytest.mark.slow
def test_presets_are_composed_as_recorded() -> None:
    recorded, now = read()["configs"], configs()
    assert now.keys() == recorded.keys()
    for preset, values in now.items():
        assert values == recorded[preset], preset
