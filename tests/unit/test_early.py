"""Values outside their bounds are refused before torch is imported, with the full check's words."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from specdec.errors import UserError
from specdec.parts.build import build_part
from specdec.parts.early import check_early

CHAIN = "specdec.policies.Chain"
OWN = '''
"""A policy of a user's."""
raise RuntimeError("imported")
from specdec.parts.fields import Count as Num
Share = str
class Own:
    def __init__(self, *, width: Num, share: Share, ratio: float | None = None) -> None: ...
'''


@pytest.mark.parametrize(
    ("where", "node"),
    [
        ("policy", {"_target_": CHAIN, "gamma": 0}),
        ("policy", {"_target_": CHAIN, "gamma": "3"}),
        ("policy", {"_target_": CHAIN, "gamma": None}),
        ("policy", {"_target_": "specdec.policies.BestFirst", "w": 0, "d": 4}),
    ],
)
def test_the_words_are_those_of_the_full_check(where: str, node: dict[str, object]) -> None:
    with pytest.raises(UserError) as full:
        build_part(node, None, where)
    with pytest.raises(UserError) as early:
        check_early(where, node)
    assert str(early.value) == str(full.value)


def test_parts_in_parts() -> None:
    with pytest.raises(UserError, match=r"policy\.inner\.gamma=0"):
        check_early("policy", {"_target_": "x.Y", "inner": {"_target_": CHAIN, "gamma": 0}})
    with pytest.raises(UserError, match=r"source\.sources\[0\]\.gamma=0"):
        check_early("source", {"_target_": "x.Y", "sources": [{"_target_": CHAIN, "gamma": 0}]})


@pytest.mark.parametrize(
    "node",
    [
        {"_target_": CHAIN, "gamma": 4},
        {"_target_": CHAIN, "gama": 4},
        {"_target_": "nowhere.Class", "gamma": 0},
        {"_target_": "specdec.policies.Missing", "gamma": 0},
        {"_target_": "Chain", "gamma": 0},
        {"_target_": 3},
        "text",
    ],
)
def test_what_the_source_does_not_tell_is_left_to_the_full_check(node: object) -> None:
    check_early("policy", node)


def test_nothing_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name counts only if the module has it from ``fields``: here ``Share`` is another type."""
    (tmp_path / "ownpolicy.py").write_text(OWN, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    check_early("policy", {"_target_": "ownpolicy.Own", "width": 2, "share": 7, "ratio": None})
    with pytest.raises(UserError, match=r"policy\.width=0"):
        check_early("policy", {"_target_": "ownpolicy.Own", "width": 0})
    with pytest.raises(UserError, match=r"policy\.ratio='x'"):
        check_early("policy", {"_target_": "ownpolicy.Own", "ratio": "x"})


@pytest.mark.parametrize(
    "words",
    [
        ["run", "strategy=speculative", "policy.gamma=0"],
        ["compare", "strategies=[ar,speculative]", "policy.gamma=0"],
        ["verify", "strategy=speculative", "policy.gamma=0"],
    ],
)
def test_commands_refuse_without_torch(words: list[str]) -> None:
    code = (
        f"import sys; from specdec.cli.main import main; status = main({words!r});"
        "sys.exit(status + 40 * ('torch' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "policy.gamma=0 cannot be used: it must be a whole number" in done.stderr
