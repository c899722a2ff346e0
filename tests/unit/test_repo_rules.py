"""House rules that a machine can check: imports, ASCII, file sizes, no paths of one machine."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_FILE_BYTES = 48_000_000  # the bundled target's limit is 40 MB
LAYERS = ("specdec", "strategies", "experiments")  # each may import only those before it
TEXT = {".py", ".md", ".yaml", ".yml", ".toml", ".txt", ".cfg", ""}

# Roots of this machine or that; joined here so that this file does not match itself.
ROOTS = "|".join(["w" + "ork", "r" + "oot", "farm", "home/[a-z]+"])
MACHINE_PATH = re.compile(rf"(?<![A-Za-z0-9_.])/({ROOTS})(/|\s|$)")


@cache
def files() -> list[Path]:
    """Files that are tracked or would be."""
    words = ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard"]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not in a git checkout")
    return sorted(ROOT / line for line in done.stdout.splitlines() if (ROOT / line).is_file())


def python_files(*folders: str) -> list[Path]:
    found = [f for f in files() if f.suffix == ".py"]
    return [f for f in found if not folders or f.relative_to(ROOT).parts[0] in folders]


@cache
def syntax(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_text_is_ascii() -> None:
    """Readers meet these files in every terminal and editor; data files may hold anything."""
    wrong = []
    assert len(python_files("specdec")) > 20
    for path in files():
        is_text = path.suffix in TEXT and "assets" not in path.parts and path.name != "LICENSE"
        if is_text and not path.read_bytes().isascii():
            wrong.append(name(path))
    assert not wrong


def test_no_path_of_one_machine() -> None:
    wrong = []
    for path in files():
        if path.suffix not in TEXT | {".json", ".jsonl", ".sh"} or path.stat().st_size > 5_000_000:
            continue
        for number, line in enumerate(path.read_text("utf-8", errors="replace").splitlines(), 1):
            if MACHINE_PATH.search(line):
                wrong.append(f"{name(path)}:{number}: {line.strip()[:80]}")
    assert not wrong


def test_the_path_rule_finds_what_it_looks_for() -> None:
    for text in ("/w" + "ork/main", "at /r" + "oot ", "'/ho" + "me/anna/x'"):
        assert MACHINE_PATH.search(text), text
    for text in ("frame/work/x", "a/root", "/workers/x", "the work/rest balance"):
        assert not MACHINE_PATH.search(text), text


def test_no_large_files() -> None:
    assert not [name(f) for f in files() if f.stat().st_size > MAX_FILE_BYTES]


def test_every_package_is_installed() -> None:
    """The list in pyproject.toml is explicit; specdec.conf is a link to conf/."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    listed = set(project["tool"]["setuptools"]["packages"])
    found = {
        ".".join(f.relative_to(ROOT).parent.parts)
        for f in python_files(*LAYERS)
        if f.name == "__init__.py"
    }
    assert listed == found | {"specdec.conf"}
    folders = {".".join(f.relative_to(ROOT).parent.parts) for f in python_files(*LAYERS)}
    assert folders <= found, "a folder with Python files lacks __init__.py"


def imported_at_once(body: list[ast.stmt]) -> set[str]:
    """Top-level packages that a module imports when it is imported itself."""
    found = set[str]()
    for node in body:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            found |= imported_at_once([*node.body, *node.orelse])
    return found


def test_only_dependencies_are_imported_at_once() -> None:
    """Others, such as those of ``dev`` and ``onnx``, may be absent: functions import them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    asked = {re.split(r"[<>=;\[ ]", item)[0].lower() for item in project["dependencies"]}
    asked |= {"specdec", "yaml", "hydra", "typing_extensions"}  # other names than the package's
    asked |= {"pydantic_core", "markupsafe"}  # parts of pydantic and jinja2
    gpu = ("specdec/attention/triton_kernel.py", "specdec/kernels/swiglu.py")
    wrong = [
        f"{name(f)}: {package}"
        for f in python_files("specdec")
        for package in imported_at_once(syntax(f).body) - sys.stdlib_module_names - asked
        if not name(f).startswith("specdec/rivals/workers/")  # run in their own environments
        and not (package == "triton" and name(f) in gpu)
    ]
    assert not wrong


def test_the_import_rule_finds_what_it_looks_for() -> None:
    text = "import a.b\nif x:\n    from c import d\ndef f():\n    import e\n"
    assert imported_at_once(ast.parse(text).body) == {"a", "c"}


def test_direct_dependencies_are_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    pinned = {
        line.split("==")[0]
        for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines()
        if "==" in line
    }
    asked = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    names = {re.split(r"[<>=;\[ ]", item)[0].lower() for item in asked}
    assert names <= pinned
