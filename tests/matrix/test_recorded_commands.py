"""Commands answer as they did when they were recorded: exit status and first line.

The table has input that nobody should give: it is refused in one line that names place and remedy,
with exit status 2, and writes nothing. The commands of the pages are those of ``tests/docs``.
``record_commands.py`` says how to record again.
"""

import pytest

from tests.matrix.record_commands import COMMAND, answer, differences, read

pytestmark = pytest.mark.slow


AT_ONCE = 40  # cases of a test
PARTS = [
    (group, start) for group, cases in read().items() for start in range(0, len(cases), AT_ONCE)
]


@pytest.mark.parametrize(("group", "start"), PARTS)
def test_commands_answer_as_recorded(group: str, start: int) -> None:
    cases = read()[group][start : start + AT_ONCE]
    found = [line for case in cases for line in differences(case, answer(case))]
    if found:
        pytest.fail(
            "\n".join([f"if this is meant, run `{COMMAND} '{group}'`", *found]), pytrace=False
        )


def test_what_is_refused_says_why() -> None:
    """Of a table that was recorded from broken code too."""
    refused = [case for cases in read().values() for case in cases if case["code"] == 2]
    assert len(refused) > 300
    for case in refused:
        if case["argv"][1:]:
            assert case["line"].startswith("specdec: "), case["argv"]
            assert len(case["line"]) > len("specdec: ") + 20, case["argv"]


def test_a_difference_is_told() -> None:
    case = {"argv": ["list"], "code": 0, "line": "a"}
    assert not differences(case, {"code": 0, "line": "a"})
    assert len(differences(case, {"code": 2, "line": "a"})) == 2
