"""Whether a command that a page shows would be taken: checked, nothing run.

Of run, verify, compare, profile, list and train, tests/matrix/recorded_commands.json has every one.
"""

import importlib.util
import os
import re
import subprocess
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

from experiments.reproduce.command import Keys
from experiments.reproduce.items import all_items, choose
from specdec.cli.arguments import read_arguments, read_values
from specdec.cli.main import _COMMANDS
from specdec.planning.job import plan_request
from tests.docs.blocks import ROOT, STANDS_FOR

ELSEWHERE = ("torchrun", "srun", "export", "cp", "git", "cd")
"""Programs that are not ours: their lines are for other machines, or trivial."""


def check(words: Sequence[str]) -> None:
    """Checks a command.

    Raises:
        UserError, AssertionError: it would be refused.
    """
    program, *rest = words
    if program == "specdec":
        name, *rest = rest
        assert name in _COMMANDS, f"specdec has no command {name}"
        if name in _SPECDEC:
            _SPECDEC[name](_filled(rest))
    elif program == "make":
        _check_make(rest)
    elif program == "python":
        _check_python(rest)
    elif program == "pip":
        _check_pip(rest)
    else:
        assert program in ELSEWHERE, program


def _filled(words: Sequence[str]) -> list[str]:
    words = list(words)
    if ">" in words:
        words = words[: words.index(">")]
    return [STANDS_FOR.get(word, os.path.expandvars(word)) for word in words]


def _check_plan(words: list[str]) -> None:
    arguments = read_arguments(words, flags=("--cfg",))
    plan_request(arguments.overrides, arguments.config_dirs)


def _check_doctor(words: list[str]) -> None:
    from specdec.cli.doctor import Keys

    read_values(words, Keys, "a head")


def _check_reproduce(words: list[str]) -> None:
    names = [word for word in words if not word.startswith("-")]
    items, _ = read_values(names, Keys, "tables", most=99, least=0)
    choose(items, all_items())


_SPECDEC: dict[str, Callable[[list[str]], None]] = {
    "plan": _check_plan,
    "reproduce": _check_reproduce,
    "doctor": _check_doctor,
}


def _check_make(words: list[str]) -> None:
    done = subprocess.run(
        ["make", "--dry-run", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def _check_python(words: list[str]) -> None:
    if words[0] == "-m":
        if words[1] != "venv":
            assert importlib.util.find_spec(words[1]) is not None, words[1]
    else:
        beside = Path.cwd() / words[0]
        assert beside.is_file() or (ROOT / words[0]).is_file(), words[0]


def _check_pip(words: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    named = [name for word in words for name in re.findall(r"\[([\w,]+)\]", word)]
    for name in ",".join(named).split(","):
        assert not name or name in extras, f"no extra {name}"
