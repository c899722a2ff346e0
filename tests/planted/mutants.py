"""Changes one line of the code at a time and runs ``specdec verify`` on the changed code.

    python -m tests.planted.mutants FILE [--only NAME ...] [--jobs N] [--output RESULTS]

FILE is YAML, from anywhere:

    commands:                          # arguments of `specdec verify`, by name
      chain: [strategy=speculative, model=random]
    mutants:
      - name: positions_shared         # unique
        area: tree
        story: a node gets the position of the last node, plus one
        file: specdec/tree/tree.py     # below --root
        old: "ints[3, new] = ints[3].take(parents) + 1"     # occurs once in the file
        new: "ints[3, new] = ints[3, start - 1] + 1"
        verify: [chain]                # commands, in turn until one fails
        no_effect: why it changes no output   # only of mutants that must survive
        missed: why it is not found           # only of mutants that do, and change output

The code itself is certified once per command. RESULTS is JSON and is continued: mutants that were
found are not run again, the others are, since the checks may have changed. Exit status: 0 if every
mutant was found but those with ``no_effect`` or ``missed``, 1 if not, 2 if FILE cannot be used.
"""

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("specdec", "strategies", "conf")
"""Folders of the code that is certified."""

TIMEOUT_S = 600.0
TIMED_OUT = 124
"""Status of a process that was ended, as of the command ``timeout``."""

_NOT_LINKED = ("__pycache__", ".git")


class Unusable(ValueError):
    """A file of mutants that cannot be used; the message says where and why, in one line."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change.

    Attributes:
        name: unique in its file.
        area: part of the library.
        story: the fault in a sentence.
        file: path below the root.
        old, new: text that occurs once in the file, and what replaces it.
        verify: commands that may find it, by name.
        no_effect: why it cannot change any output; empty if it must be found.
        missed: why the certificate does not find it, although it changes output.
    """

    name: str
    area: str
    story: str
    file: str
    old: str
    new: str
    verify: tuple[str, ...]
    no_effect: str = ""
    missed: str = ""

    def applied(self, root: Path) -> str:
        """The changed text of the file.

        Raises:
            Unusable: there is no such file, or ``old`` does not occur exactly once in it.
        """
        path = root / self.file
        if not path.is_file():
            raise Unusable(f"mutant {self.name}: {self.file} is not a file below {root}")
        text = path.read_text("utf-8")
        found = text.count(self.old)
        if found != 1:
            raise Unusable(
                f"mutant {self.name}: its old text occurs {found} times in {self.file}; give text"
                " that occurs once"
            )
        return text.replace(self.old, self.new)


@dataclass(frozen=True, slots=True)
class Mutants:
    """The content of a file: commands and mutants, by name."""

    commands: Mapping[str, tuple[str, ...]]
    mutants: Mapping[str, Mutant]


def read_mutants(path: Path) -> Mutants:
    """Reads a file of mutants.

    Raises:
        Unusable: it is missing, is no YAML of this form, or names a command that it lacks.
    """
    try:
        content = yaml.safe_load(path.read_text("utf-8"))
        commands = {name: tuple(_flat(words)) for name, words in content["commands"].items()}
        listed = [Mutant(**{**one, "verify": tuple(one["verify"])}) for one in content["mutants"]]
    except (OSError, UnicodeError, yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise Unusable(f"{path} cannot be read: {type(error).__name__}: {reason}") from error
    mutants = {mutant.name: mutant for mutant in listed}
    if len(mutants) < len(listed):
        names = [mutant.name for mutant in listed]
        twice = next(name for name in names if names.count(name) > 1)
        raise Unusable(f"{path} has two mutants with the name {twice}")
    for mutant in listed:
        unknown = [name for name in mutant.verify if name not in commands]
        if unknown or not mutant.verify:
            raise Unusable(
                f"mutant {mutant.name}: verify={list(mutant.verify)} must name commands of the file"
            )
    return Mutants(commands, mutants)


def _flat(words: Sequence[Any]) -> Iterator[str]:
    """The words of a list that may contain lists (YAML aliases)."""
    for word in words:
        yield from _flat(word) if isinstance(word, list) else [str(word)]


def overlay(root: Path, file: str, text: str, folder: Path) -> None:
    """Fills ``folder`` with links to everything in ``root``, and with ``text`` as ``file``."""
    source, target = root, folder
    for part in Path(file).parts:
        target.mkdir(exist_ok=True)
        for entry in source.iterdir():
            if entry.name != part and entry.name not in _NOT_LINKED:
                (target / entry.name).symlink_to(entry)
        source, target = source / part, target / part
    target.write_text(text, encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Certificate:
    """How ``specdec verify`` ended.

    Attributes:
        status: exit status; ``TIMED_OUT`` if it was ended.
        checks: names of the failed checks.
        detail: detail of the first failed check; it begins with "raised" for an error of the
            strategy.
        seconds: duration of the command.
        output: the end of the printed output.
    """

    status: int
    checks: tuple[str, ...]
    detail: str
    seconds: float
    output: str


def verify(
    words: Sequence[str], root: Path, change: tuple[str, str] | None, timeout_s: float
) -> Certificate:
    """``specdec verify`` on the code in ``root``, with another text of one file."""
    with tempfile.TemporaryDirectory() as scratch:
        folder, code = Path(scratch), root
        if change is not None:
            code = folder / "code"
            overlay(root, *change, code)
        out, printed = folder / "certificate", folder / "printed"
        module = [sys.executable, "-m", "specdec.cli.main", "verify", "--fail-fast"]
        given = {"PYTHONPATH": str(code), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        given["SPECDEC_BACKEND"] = "auto"  # as users run it; tests pin eager passes
        start = time.perf_counter()
        with printed.open("wb") as file:
            process = subprocess.Popen(
                [*module, *words, f"output_dir={out}"],
                cwd=code,
                env={**os.environ, **given},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                status = TIMED_OUT
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # also ranks that it left behind
                process.wait()
        result = out / "verify.json"
        checks = json.loads(result.read_text("utf-8"))["checks"] if result.is_file() else []
        failed = [check for check in checks if check["passed"] is False]
        return Certificate(
            status=status,
            checks=tuple(check["name"] for check in failed),
            detail=failed[0]["detail"] if failed else "",
            seconds=time.perf_counter() - start,
            output=printed.read_text("utf-8", errors="replace")[-3000:],
        )


class Run:
    """A run over mutants, with the results that are there already.

    Attributes:
        results: what is written to RESULTS: ``command``, ``controls`` (the code itself, by name of
            the command) and ``mutants`` (by name), each with the revision of the code.
    """

    def __init__(
        self, content: Mutants, root: Path, *, timeout_s: float, output: Path | None, command: str
    ) -> None:
        self._content, self._root = content, root
        self._timeout_s, self._output = timeout_s, output
        self._revision = revision(root)
        known: dict[str, Any] = {}
        if output is not None and output.is_file():
            known = json.loads(output.read_text("utf-8"))
        self.results: dict[str, Any] = {
            "command": command,
            "controls": known.get("controls", {}),
            "mutants": known.get("mutants", {}),
        }

    def control(self, name: str) -> None:
        """Certifies the code as it is with a command.

        Raises:
            Unusable: the certificate is not given.
        """
        words = " ".join(self._content.commands[name])
        if self.results["controls"].get(name, {}).get("arguments") == words:
            return
        found = verify(self._content.commands[name], self._root, None, self._timeout_s)
        if found.status:
            raise Unusable(
                f"command {name}: `specdec verify {words}` returns {found.status} without any"
                f" mutant: {found.detail or _last_line(found.output)}"
            )
        self.results["controls"][name] = {
            "arguments": words,
            "revision": self._revision,
            "seconds": round(found.seconds, 1),
        }
        self._write()

    def key(self, name: str) -> str:
        """A hash of a mutant and of its commands, without what is only for readers."""
        mutant = self._content.mutants[name]
        lines = [(command, self._content.commands[command]) for command in mutant.verify]
        change = (mutant.file, mutant.old, mutant.new, lines)
        return hashlib.sha256(repr(change).encode()).hexdigest()[:16]

    def mutant(self, name: str) -> dict[str, Any]:
        """Tests a mutant; returns its entry of the results."""
        mutant, key = self._content.mutants[name], self.key(name)
        known = self.results["mutants"].get(name)
        if known is not None and known["key"] == key and known["result"] == "found":
            return dict(known)
        change, seconds = (mutant.file, mutant.applied(self._root)), 0.0
        for command in mutant.verify:
            words = self._content.commands[command]
            found = verify(words, self._root, change, self._timeout_s)
            seconds, last = seconds + found.seconds, command
            if found.status:
                break
        entry = {
            "area": mutant.area,
            "result": result_of(found),
            "command": last,
            "checks": list(found.checks),
            "raised": found.status == 2 or found.detail.startswith("raised "),
            "detail": (found.detail or (_last_line(found.output) if found.status else ""))[:300],
            "seconds": round(seconds, 1),
            "revision": self._revision,
            "key": key,
        }
        self.results["mutants"][name] = entry
        self._write()
        return entry

    def _write(self) -> None:
        if self._output is not None:
            self._output.write_text(json.dumps(self.results, indent=1) + "\n", encoding="utf-8")


def result_of(found: Certificate) -> str:
    """The outcome in words: "found", "survived", "timed out" or "crashed" (no verdict).

    A changed code that refuses the command (status 2) is found: the code itself certifies it.
    """
    if (found.status == 1 and found.checks) or found.status == 2:
        return "found"
    return {0: "survived", TIMED_OUT: "timed out"}.get(found.status, "crashed")


def as_expected(entry: Mapping[str, Any], mutant: Mutant) -> bool:
    """Whether a mutant was found, or survived and has no effect or is known to be missed."""
    survives = bool(mutant.no_effect or mutant.missed)
    return bool(entry["result"] == ("survived" if survives else "found"))


def report(
    entries: Mapping[str, Mapping[str, Any]], mutants: Mapping[str, Mutant]
) -> Iterator[str]:
    """A line per mutant, then the counts."""
    width = max(map(len, entries), default=0)
    for name, entry in entries.items():
        yield f"{name:<{width}}  {line_of(entry, mutants[name])}"
    found = [entry for entry in entries.values() if entry["result"] == "found"]
    survived = [mutants[name] for name, e in entries.items() if e["result"] == "survived"]
    equal = sum(bool(mutant.no_effect) for mutant in survived)
    missed = sum(bool(mutant.missed) for mutant in survived)
    raised = sum(entry["raised"] for entry in found)
    yield (
        f"{len(found)} of {len(entries)} mutants found ({raised} by an error of the changed code);"
        f" {equal} survived that have no effect, {missed} are known to be missed;"
        f" {len(entries) - len(found) - equal - missed} left"
    )


def line_of(entry: Mapping[str, Any], mutant: Mutant) -> str:
    """A mutant's outcome, and what found it."""
    line = f"{entry['result']:<9}  {entry['seconds']:>6.1f} s  {entry['command']}"
    why = (mutant.no_effect and "no effect") or (mutant.missed and "missed") or entry["detail"]
    what = ", ".join(entry["checks"]) or why
    return f"{line}: {what}" + (" (error)" if entry["raised"] else "")


def revision(root: Path) -> str:
    """The commit of ``root``, with ``+`` if its code has changes; empty outside git."""
    git = ["git", "-C", str(root)]
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    dirty = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", *SOURCES], capture_output=True)
    return head.stdout.strip() + ("+" if head.stdout and dirty.returncode else "")


def _last_line(output: str) -> str:
    return next((line for line in reversed(output.splitlines()) if line.strip()), "")


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.planted.mutants")
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--jobs", type=int, default=1, help="certificates at the same time")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="seconds per certificate")
    parser.add_argument("--output", type=Path, help="JSON with the results, which is continued")
    parser.add_argument("--root", type=Path, default=ROOT, help="folder of the code")
    given = parser.parse_args(words)
    try:
        content = read_mutants(given.file)
        names = given.only or list(content.mutants)
        unknown = [name for name in names if name not in content.mutants]
        if unknown:
            raise Unusable(f"{given.file} has no mutant {', '.join(unknown)}")
        for name in names:
            content.mutants[name].applied(given.root)
        line = f"python -m tests.planted.mutants {given.file.name}"
        run = Run(content, given.root, timeout_s=given.timeout, output=given.output, command=line)
        entries = {}
        with ThreadPoolExecutor(given.jobs) as pool:
            for name, entry in zip(names, pool.map(run.mutant, names), strict=True):
                entries[name] = entry
                line = line_of(entry, content.mutants[name])
                print(f"{name}: {line}", file=sys.stderr, flush=True)
            commands = dict.fromkeys(entry["command"] for entry in entries.values())
            list(pool.map(run.control, commands))
    except Unusable as error:
        print(f"mutants: {error}", file=sys.stderr)
        return 2
    print("\n".join(report(entries, content.mutants)))
    right = [as_expected(entry, content.mutants[name]) for name, entry in entries.items()]
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
