"""Records exit status and first line of commands: hostile input, and ``--help`` and the like.

    python -m tests.matrix.record_commands                  (all cases)
    python -m tests.matrix.record_commands targets values   (these groups; the others stay)

runs cases of ``recorded_commands.json`` again and writes what the present code answers;
``test_recorded_commands.py`` compares. A new case is an entry with ``argv`` and, where the command
reads files, ``files``; recording adds the rest. Say in the commit why an answer changes.
The commands of the pages are composed and run by ``tests/docs``.

A case runs in this process, in an empty folder. Its keys:

- ``argv``: the words after ``specdec``. ``files``: path -> content; a path that ends in "/" is an
  empty folder, "@3" is number 3 of the file's ``contents``. Words and contents that begin with
  "bz2:" are compressed, in base 85.
- ``env``: environment variables.
- ``code``: the exit status. ``line``: of refused input the message, of anything else the first note
  or line of output. ``began``: true where a run was refused after its folder was made. ``config``:
  hash of the composed configuration that is printed.
"""

import base64
import bz2
import hashlib
import io
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

from specdec.cli.main import main as specdec
from tests.docs.blocks import ROOT

FILE = Path(__file__).with_name("recorded_commands.json")
COMMAND = "python -m tests.matrix.record_commands"
LONGEST = 300  # characters of a line
_OF_MACHINE = re.compile(r"\([^()]*\b(CUDA|cuda)\b[^()]*\)")  # why there is no such device
_UNSTABLE = re.compile(r"^\s*(_target_|hash|git_sha):.*\n", re.M)  # of a printed configuration

Case = dict[str, Any]


def read() -> dict[str, list[Case]]:
    """Group -> cases, with the contents of their files put in."""
    stored = json.loads(FILE.read_text(encoding="utf-8"))
    contents = stored.pop("contents")
    for cases in stored.values():
        for case in cases:
            for path, content in case.get("files", {}).items():
                if content.startswith("@"):
                    case["files"][path] = contents[int(content[1:])]
    return stored


def write(groups: Mapping[str, list[Case]]) -> None:
    """Writes the file, one case per line; long contents of files are written once."""
    numbers: dict[str, int] = {}
    lines = []
    for group, cases in groups.items():
        lines.append(f'"{group}": [')
        for case in cases:
            files = {
                path: content
                if len(content) < 60
                else f"@{numbers.setdefault(content, len(numbers))}"
                for path, content in case.get("files", {}).items()
            }
            lines.append(json.dumps({**case, **({"files": files} if files else {})}) + ",")
        lines[-1] = lines[-1].removesuffix(",")
        lines.append("],")
    contents = ",\n".join(map(json.dumps, numbers))
    text = "{\n" + "\n".join(lines) + '\n"contents": [\n' + contents + "\n]\n}\n"
    FILE.write_text(text, encoding="utf-8")


def answer(case: Case) -> Case:
    """Runs a case; returns its ``code``, ``line`` and, if it has one, ``config``."""
    with tempfile.TemporaryDirectory() as name, _standing_in(Path(name), case):
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            code = specdec(
                [decoded(word).decode("utf-8", "surrogatepass") for word in case["argv"]]
            )
        said = err.getvalue().splitlines()
        assert not any(line.startswith("Traceback") for line in said), said
        began = code == 2 and Path("outputs").exists()
        notes = (text for text in said if text.startswith(("note:", "specdec:")))
        line = said[-1] if code and said else next(notes, out.getvalue().partition("\n")[0])
        for folder, word in ((Path.cwd(), "CWD"), (Path(name), "CWD"), (ROOT, "ROOT")):
            line = line.replace(str(folder), word)
        line = _OF_MACHINE.sub("(...)", line)
    found: Case = {
        "code": code,
        "line": line if len(line) <= LONGEST else line[:LONGEST] + " [...]",
    }
    if began:
        found["began"] = True
    if "config" in case:
        config = _UNSTABLE.sub("", out.getvalue())
        found["config"] = hashlib.sha256(config.encode()).hexdigest()[:8]
    return found


@contextmanager
def _standing_in(folder: Path, case: Case) -> Iterator[None]:
    """The folder with the files of a case as the working directory."""
    for path, content in case.get("files", {}).items():
        target = folder / path
        (target if path.endswith("/") else target.parent).mkdir(parents=True, exist_ok=True)
        if not path.endswith("/"):
            target.write_bytes(decoded(content))
    path, modules = list(sys.path), set(sys.modules)
    try:
        with chdir(folder), mock.patch.dict(os.environ, case.get("env", {})):
            yield
    finally:
        sys.path[:] = path
        for name in {*sys.modules} - modules:  # modules beside a tree of the case
            if getattr(sys.modules[name], "__file__", "") and str(folder) in str(
                sys.modules[name].__file__
            ):
                del sys.modules[name]


def decoded(content: str) -> bytes:
    if content.startswith("bz2:"):
        return bz2.decompress(base64.b85decode(content[4:]))
    return content.encode("utf-8", "surrogatepass")


def differences(case: Case, now: Case) -> list[str]:
    """What an answer differs in from the record, as lines to read."""
    changed = [key for key in ("code", "line", "began", "config") if case.get(key) != now.get(key)]
    words = " ".join(map(repr, case["argv"]))[:200]
    return [f"specdec {words}"] * bool(changed) + [
        f"    {key}: recorded {case.get(key)!r}\n    {' ' * len(key)}  now      {now.get(key)!r}"
        for key in changed
    ]


def main(chosen: Sequence[str]) -> None:
    """Records the cases of these groups, or of all."""
    groups = read()
    for group, cases in groups.items():
        for case in cases:
            if group not in chosen and chosen and "code" in case:
                continue
            try:
                now = answer(case)
            except BaseException as error:
                error.add_note(f"in {case['argv']}")
                raise
            for line in differences(case, now):
                print(line)
            case.pop("began", None)
            case.update(now)
    write(groups)


if __name__ == "__main__":
    main(sys.argv[1:])
