"""The shipped mutants and their results, and one of them through the command."""

import ast
import json
from pathlib import Path

import pytest

from tests.planted.mutants import ROOT, Run, as_expected, read_mutants, report

FILE = Path(__file__).with_name("mutants.yaml")
RESULTS = FILE.with_suffix(".json")
MIN_RESULTS = 79  # all of the file
SAMPLE = "candidate_cache_mixes_rows"  # found early, so that the command soon ends


def test_every_mutant_applies_and_is_python() -> None:
    content = read_mutants(FILE)
    for mutant in content.mutants.values():
        ast.parse(mutant.applied(ROOT))
    used = {name for mutant in content.mutants.values() for name in mutant.verify}
    assert used == set(content.commands)


def test_results_are_those_of_the_file() -> None:
    """Each in RESULTS was run as it is in the file, and found unless it has no effect."""
    content, results = read_mutants(FILE), json.loads(RESULTS.read_text("utf-8"))
    run, entries = Run(content, ROOT, timeout_s=1.0, output=None, command=""), results["mutants"]
    assert len(entries) >= MIN_RESULTS
    assert {name: entry["key"] for name, entry in entries.items()} == {
        name: run.key(name) for name in entries
    }
    wrong = [n for n, entry in entries.items() if not as_expected(entry, content.mutants[n])]
    assert wrong == []
    assert list(report(entries, content.mutants))[-1].endswith("; 0 left")
    for name, control in results["controls"].items():
        assert control["arguments"] == " ".join(content.commands[name])


@pytest.mark.distributed  # a process of its own
def test_the_command_finds_one_of_them() -> None:
    run = Run(read_mutants(FILE), ROOT, timeout_s=300.0, output=None, command="")
    assert run.mutant(SAMPLE)["result"] == "found"
