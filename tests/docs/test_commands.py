"""Every command in README and docs is taken; those marked are run, and print what is shown."""

import ast
import re
import sys
from pathlib import Path

import pytest

from specdec.cli.main import main
from specdec.errors import UserError
from tests.docs.blocks import ROOT, Block, blocks, commands, pages, write_files_of_pages
from tests.docs.checking import check

NAMES = [str(page.relative_to(ROOT)) for page in pages()]


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data_dir: Path) -> Path:
    """A folder with the files that the pages speak of, to stand in."""
    write_files_of_pages(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPECDEC_DATA", str(data_dir))
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("careful", "echo"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("page", NAMES)
def test_every_command_would_be_taken(page: str, stage: Path) -> None:
    wrong = []
    for block in blocks(ROOT / page):
        for command in commands(block):
            try:
                check(command.words)
            except (UserError, AssertionError) as error:
                wrong.append(f"{command.place}: {' '.join(command.words)}\n  {error}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("page", NAMES)
def test_marked_commands_run_and_print_what_is_shown(
    page: str, stage: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = ""
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(ROOT / page):
        if block.mark == "run" and block.language == "python":
            exec(compile(block.text, block.place, "exec"), names)
        elif block.mark == "run":
            for command in commands(block):
                assert command.words[0] == "specdec", f"{command.place}: only specdec is run here"
                assert main(command.words[1:]) == 0, command.place
        if block.mark == "run":
            printed = capsys.readouterr().out
        elif block.mark == "output":
            missing = not_printed(block, printed)
            assert not missing, f"{block.place} shows what is not printed: {missing}\n{printed}"


def not_printed(block: Block, printed: str) -> list[str]:
    """The lines of a block that were not printed, in this order; numbers may differ."""
    rest = [normal(line) for line in printed.splitlines()]
    missing = []
    for line in block.text.splitlines():
        if not normal(line):
            continue
        if normal(line) in rest:
            rest = rest[rest.index(normal(line)) + 1 :]
        else:
            missing.append(line)
    return missing


def normal(line: str) -> str:
    """A line without what differs from machine to machine: numbers, widths, rules."""
    line = re.sub(r"[^\x00-\x7f-]+|-{3,}", " ", line)
    return " ".join(re.sub(r"\d+([.,]\d+)*", "#", line).split())


@pytest.mark.parametrize("page", NAMES)
def test_python_blocks_are_python(page: str) -> None:
    for block in blocks(ROOT / page):
        if block.language == "python":
            ast.parse(block.text, filename=block.place)


def test_there_are_commands_to_check() -> None:
    found = [c for page in pages() for block in blocks(page) for c in commands(block)]
    assert len(found) > 30
    marked = [block for page in pages() for block in blocks(page) if block.mark == "run"]
    assert len(marked) >= 4
