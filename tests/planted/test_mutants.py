"""The runner of mutants, the shipped file of them, and a few of them through the command."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.planted.certificate import Certificate, certificate
from tests.planted.mutants import (
    Mutant,
    Run,
    Unusable,
    as_expected,
    main,
    overlay,
    read_mutants,
    report,
    result_of,
)
from tests.planted.warm import ROOT, TIMED_OUT, Pool

FILE = Path(__file__).with_name("mutants.yaml")
RESULTS = FILE.with_suffix(".json")
MIN_RESULTS = 50  # of the 85 in the file; RESULTS is continued by the command
SAMPLE = ("residual_not_normalised",)

GOOD = """
words: &words [model=random]
commands: {chain: [strategy=speculative, *words]}
mutants:
  - {name: one, area: tree, story: a fault, file: pkg/a.py, old: "1", new: "2", verify: [chain]}
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A package to change."""
    root = tmp_path / "code"
    (root / "pkg" / "data").mkdir(parents=True)
    (root / "pkg" / "__init__.py").write_text("")
    (root / "pkg" / "a.py").write_text("X = 1\n")
    (root / "pkg" / "data" / "b.txt").write_text("data")
    return root


def test_a_change_is_imported_and_the_code_stays_as_it_was(code: Path, tmp_path: Path) -> None:
    overlay(code, "pkg/a.py", "X = 2\n", tmp_path / "changed")
    words = [sys.executable, "-c", "import pkg.a; print(pkg.a.X, pkg.a.__file__)"]
    done = subprocess.run(words, cwd=tmp_path / "changed", capture_output=True, text=True)
    assert done.stdout.split() == ["2", str(tmp_path / "changed" / "pkg" / "a.py")]
    assert (code / "pkg" / "a.py").read_text() == "X = 1\n"
    assert (tmp_path / "changed" / "pkg" / "data" / "b.txt").read_text() == "data"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("pkg/a.py", "pkg/c.py", "pkg/c.py is not a file below"),
        ('old: "1"', 'old: "7"', "its old text occurs 0 times in pkg/a.py"),
        ('old: "1"', 'old: ""', "give text that occurs once"),
        ("verify: [chain]", "verify: [tree]", "verify=['tree'] must name commands of the file"),
        ("verify: [chain]", "verify: []", "verify=[] must name commands of the file"),
        ("area: tree, ", "", "cannot be read: TypeError"),
        ("mutants:", "others:", "cannot be read: KeyError"),
        ("{name: one", "[name: one", "cannot be read: ParserError"),
    ],
)
def test_a_file_that_cannot_be_used_gives_one_line(
    old: str, new: str, message: str, code: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = code / "mutants.yaml"
    path.write_text(GOOD.replace(old, new))
    assert main([str(path), "--root", str(code)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error


def test_names_are_unique_and_known(code: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = code / "mutants.yaml"
    path.write_text(GOOD + GOOD.splitlines()[-1] + "\n")
    with pytest.raises(Unusable, match="two mutants with the name one"):
        read_mutants(path)
    path.write_text(GOOD)
    assert main([str(path), "--root", str(code), "--only", "two"]) == 2
    assert "has no mutant two" in capsys.readouterr().err


@pytest.mark.exhaustive
@pytest.mark.xdist_group("planted")
def test_what_a_process_ends_with(code: Path, tmp_path: Path, pool: Pool) -> None:
    """Its status is that of ``python -m``; one that hangs is ended, with its own children."""
    (code / "pkg" / "hangs.py").write_text(
        "import subprocess, sys\n"
        "print('begun', flush=True)\n"
        "subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    )
    (code / "pkg" / "fails.py").write_text("import sys, pkg.a\nsys.exit(pkg.a.X + 2)\n")
    (code / "pkg" / "raises.py").write_text("import pkg.a\nraise ValueError(pkg.a.X)\n")
    with pool.one() as warm:
        hung, failed, raised = (
            certificate(warm, [f"pkg.{name}"], tmp_path, code=code, timeout_s=limit)
            for name, limit in (("hangs", 1.0), ("fails", 60.0), ("raises", 60.0))
        )
    assert (hung.status, hung.output.split()) == (TIMED_OUT, ["begun"])
    assert failed.status == 3
    assert raised.status == 1
    assert raised.output.endswith("ValueError: 1\n")
    assert [result_of(one) for one in (hung, failed, raised)] == ["timed out", "crashed", "crashed"]


def test_what_counts_as_found() -> None:
    def ended(status: int, *checks: str) -> Certificate:
        return Certificate(status, checks, "", False, 1.0, "")

    outcomes = {
        "found": ended(1, "greedy_parity"),
        "survived": ended(0),
        "crashed": ended(1),  # an error outside the checks: no verdict
    }
    for word, found in outcomes.items():
        assert result_of(found) == word
    assert result_of(ended(2)) == "crashed"
    fault = Mutant("one", "tree", "a fault", "a.py", "1", "2", ("chain",))
    equal = replace(fault, no_effect="why")
    assert [as_expected({"result": word}, fault) for word in outcomes] == [True, False, False]
    assert [as_expected({"result": word}, equal) for word in outcomes] == [False, True, False]


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


@pytest.mark.exhaustive  # test_planted certifies code with faults in the same way
@pytest.mark.xdist_group("planted")
def test_the_command_finds_some_of_them(pool: Pool) -> None:
    run = Run(read_mutants(FILE), ROOT, timeout_s=300.0, output=None, command="")
    entries = dict(zip(SAMPLE, pool.each(run.mutant, SAMPLE), strict=True))
    assert [entry["result"] for entry in entries.values()] == ["found"] * len(SAMPLE), entries
