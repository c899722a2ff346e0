"""The code blocks of README and docs: what is a command, and what is to be run.

A comment ``<!-- run -->`` before a block of commands (or of Python) has them executed, in a copy of
docs/examples; ``<!-- output -->`` before the next block says that it shows what they print.
"""

import json
import re
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

from specdec.config.options import CONFIG_DIR

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("specdec", "make", "python", "pip", "torchrun", "srun", "export", "cp", "git", "cd")
STANDS_FOR = {
    "model.target=PATH": "model.target=bundled:target",
    "model.draft=PATH": "model.draft=bundled:draft",
}
"""Placeholders of the pages, and what is put there."""

_MARK = re.compile(r"^<!-- (run|output) -->$")
_ASSIGNMENT = re.compile(r"^[A-Z_]+=\S*$")
_COMMENT = re.compile(r"\s+#\s.*$")


@dataclass(frozen=True, slots=True)
class Block:
    """A block of code in a page.

    Attributes:
        page: the file.
        line: of its first line, from 1.
        language: first word after the fence; empty for indented blocks.
        text: its lines, without indentation.
        mark: run, output, or empty.
    """

    page: Path
    line: int
    language: str
    text: str
    mark: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True, slots=True)
class Command:
    """A command that a page shows: its words, and where."""

    place: str
    words: tuple[str, ...]


def pages() -> list[Path]:
    """README and every page of the documentation."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path) -> list[Block]:
    """The code blocks of a page, fenced or indented, in order."""
    lines = page.read_text(encoding="utf-8").splitlines()
    found: list[Block] = []
    mark = ""
    at = 0
    while at < len(lines):
        line = lines[at]
        marked = _MARK.match(line)
        first = at
        if marked:
            mark = marked[1]
        if line.startswith("```"):
            at += 1
            while at < len(lines) and not lines[at].startswith("```"):
                at += 1
            body = lines[first + 1 : at]
            found.append(Block(page, first + 1, line[3:].partition(" ")[0], "\n".join(body), mark))
            mark = ""
        elif line.startswith("    ") and (at == 0 or not lines[at - 1].strip()):
            while at + 1 < len(lines) and (
                not lines[at + 1].strip() or lines[at + 1][:4] == "    "
            ):
                at += 1
            body = [text[4:] for text in lines[first : at + 1]]
            text = "\n".join(body).rstrip("\n")
            found.append(Block(page, first + 1, "", text, mark))
            mark = ""
        elif line.strip() and not marked:
            mark = ""
        at += 1
    return found


def commands(block: Block) -> list[Command]:
    """The commands of a block; none where it is no shell."""
    if block.language not in ("", "bash", "console", "sh"):
        return []
    found: list[Command] = []
    lines = block.text.split("\n")
    at = 0
    while at < len(lines):
        first, line = at, lines[at].removeprefix("$ ")
        while line.endswith("\\") and at + 1 < len(lines):
            at += 1
            line = line[:-1] + lines[at].strip()
        at += 1
        words = _words(line)
        if words:
            place = f"{block.page.relative_to(ROOT)}:{block.line + first}"
            found.append(Command(place, words))
    return found


def _words(line: str) -> tuple[str, ...]:
    """The words of a command line without comment and variables before it; () if it is none."""
    line = _COMMENT.sub("", line)
    if not line or line[0].isspace():
        return ()
    try:
        words = shlex.split(line)
    except ValueError:  # prose or a drawing
        return ()
    while words and _ASSIGNMENT.match(words[0]):
        words.pop(0)
    return tuple(words) if words and words[0] in PROGRAMS else ()


def write_files_of_pages(folder: Path) -> None:
    """Writes the files that the commands of the pages read into an empty folder."""
    shutil.copytree(ROOT / "docs/examples", folder, dirs_exist_ok=True)
    careful = (folder / "conf/strategy/careful.yaml").read_text()
    (folder / "conf/strategy/mine.yaml").write_text(careful.replace("name: careful", "name: mine"))
    (folder / "prompts.jsonl").write_text(json.dumps({"question": "Why?", "prompt": "x"}) + "\n")
    (folder / "prompts.txt").write_text("one\n\ntwo\n")
    for name in ("real", "box"):
        (folder / "outputs" / name).mkdir(parents=True)
    record = ROOT / "specdec/assets/records/humaneval.npz"
    shutil.copy(record, folder / "outputs/real/record.npz")
    profile = CONFIG_DIR / "profile/uniform_30ms.yaml"
    shutil.copy(profile, folder / "outputs/box/measured.yaml")
