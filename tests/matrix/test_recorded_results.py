"""Result files, the counts of ``make demo`` and a reproduction per paper are as recorded."""

from pathlib import Path

import pytest

from tests.matrix.record_results import COMMAND, PARTS, differences, read

LARGE = [part for part in PARTS if part not in ("files", "demo") and part in read()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "part", ["files", "demo", *(pytest.param(p, marks=pytest.mark.exhaustive) for p in LARGE)]
)
def test_results_are_as_recorded(part: str, data_dir: Path) -> None:
    found = differences(read()[part], PARTS[part](), part)
    if found:
        pytest.fail("\n".join([f"if this is meant, run `{COMMAND} {part}`", *found]), pytrace=False)


def test_a_difference_is_told() -> None:
    recorded = {"a": {"b": [1, 2]}, "c": "x"}
    assert not differences(recorded, {"c": "x", "a": {"b": [1, 2]}})
    assert differences(recorded, {"a": {"b": [1, 3]}}) == [
        " / a / b: recorded 2, now 3",
        " / c: recorded 'x', now None",
    ]
