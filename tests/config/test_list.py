"""``specdec list`` says what every preset needs and costs, by its parts' own YAML."""

import re
from pathlib import Path

import pytest

from specdec.cli.main import main
from specdec.config.options import chosen_parts, options, stated
from specdec.parts.build import build_part
from tests.matrix.cells import option

STEPS = 5  # between the steps of the two numbers of nodes that are compared


WITHOUT_ROWS = {"adaptive", "amusd", "dsi", "flowspec", "pearl", "pipespec", "ssd"}
"""Policies whose number of rows is none of their keys."""


@pytest.mark.parametrize("name", sorted({*options("policy")} - WITHOUT_ROWS))
def test_the_rows_are_those_of_the_policy(name: str) -> None:
    """Per target pass, or per step of a pipeline."""
    told = stated(options("policy")[name], "Costs").replace("one row", "1 rows")
    policy = build_part(option("policy", name), {}, "policy")
    if found := re.search(r"(\d+) rows per step", told):
        held = policy.max_cached_nodes(1 + STEPS) - policy.max_cached_nodes(1)
        assert int(found[1]) * STEPS == held
    else:
        found = re.search(r"(\d+) rows", told)
        assert found is not None
        assert int(found[1]) == policy.max_cached_nodes(1)


@pytest.mark.slow
def test_a_preset_has_what_its_parts_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "strategy"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()[1:] if line}
    assert lines.keys() == options("strategy").keys()
    for name, path in options("strategy").items():
        assert "; needs " in lines[name]
        for group, part in chosen_parts(path).items():
            if group in ("source", "executor"):
                assert stated(options(group)[part], "Needs") in lines[name]
            elif group == "policy":
                assert stated(options(group)[part], "Costs") in lines[name]


def test_an_option_has_the_lines_of_the_one_that_it_extends(tmp_path: Path) -> None:
    (tmp_path / "policy").mkdir()
    for name, base in (("mine", "chain"), ("one", "other"), ("other", "one")):
        (tmp_path / "policy" / f"{name}.yaml").write_text(f"defaults:\n  - {base}\n  - _self_\n")
    found = options("policy", [tmp_path])
    assert stated(found["mine"], "Costs") == stated(options("policy")["chain"], "Costs") != ""
    assert stated(found["one"], "Costs") == ""  # they extend each other
    derived = options("source")["eagle1"]
    assert "Needs" not in derived.read_text(encoding="utf-8")
    assert stated(derived, "Needs") == "an EAGLE head"
