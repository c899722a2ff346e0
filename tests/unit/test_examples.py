"""The scripts of docs/examples run as a reader would run them, and print what they are about."""

import re
import runpy
import sys
from pathlib import Path

import pytest

from specdec.cli.main import main
from specdec.models.bundled import PACKAGES

DOCS = Path(__file__).resolve().parents[2] / "docs"
EXAMPLES = DOCS / "examples"
PAGES = ("adding.md", "python.md")
FENCE = re.compile(r'^```\w+ title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
SCRIPTS = {
    "own_policy.py": r"careful +48 tokens, \d+ target passes, \d+ draft passes\n.*greedy_parity",
    "own_source.py": r"1\.00 tokens per target pass with strategy=ar\n.*source=echo.*tree_inv",
    "compared.py": r"ar( \*)? +reference.*\{'ar': 1\.0.*\[24, 24, 24\].*greedy_parity +passed",
    "sweep.py": r"gamma  tokens per pass.*\n +1 .*\n +2 .*\n +4 ",
    "watch.py": r"\[.*\].*-- 96 tokens in \d\d passes of the target, \d+ of them drafted",
    "read_trace.py": r"\d+ hits, \d+ misses\n.*rank 8: stage 8 +busy",
}


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples' folder on the path, as for a script that is started there."""
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    for name in ("careful", "echo", "topk"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_script_runs(
    script: str,
    beside: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))  # where no real model is installed
    runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    assert re.search(SCRIPTS[script], capsys.readouterr().out, re.DOTALL)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_shows_each_example_as_it_is_in_its_file(page: str) -> None:
    blocks = FENCE.findall((DOCS / page).read_text(encoding="utf-8"))
    assert blocks
    for name, code in blocks:
        assert code == (EXAMPLES / name).read_text(encoding="utf-8"), f"{page}: {name}"


@pytest.mark.slow
def test_an_executor_can_tell_the_warm_up(
    beside: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its prompt is decoded twice with the same batches, the first time uncounted."""
    words = ["--config-dir", str(EXAMPLES / "conf"), "executor=logged", "model=random"]
    words += ["data=stdlib", "data.limit=1", "max_new_tokens=6", f"output_dir={tmp_path / 'run'}"]
    assert main(["run", "strategy=ar", *words]) == 0
    lines = re.findall(r"^(warm-up, )?(step \d+: .*)$", capsys.readouterr().err, re.MULTILINE)
    half = len(lines) // 2
    assert [bool(mark) for mark, _ in lines] == [True] * half + [False] * half
    assert [text for _, text in lines[:half]] == [text for _, text in lines[half:]]
    assert half >= 6


def test_the_verifier_does_what_it_says(beside: None) -> None:
    """With k=1 it is greedy decoding; with more it accepts more, and is called lossy."""
    import specdec

    def generate(*words: str) -> specdec.Generation:
        model = ["model=random", "model.num_layers=2", "model.vocab_size=32", "max_new_tokens=24"]
        return specdec.generate(
            [1, 2, 3], overrides=[*model, *words], config_dirs=[EXAMPLES / "conf"]
        )

    plain, one = generate("strategy=ar"), generate("verifier=topk", "verifier.k=1")
    wide = generate("verifier=topk", "verifier.k=32")
    assert one.tokens == plain.tokens != wide.tokens
    assert wide.metrics["acceptance_rate"] == 1.0, "every token is among the 32 best of 32"
    assert wide.metrics["acceptance_length"] > one.metrics["acceptance_length"]
    with pytest.raises(specdec.UserError, match=r"verifier\.k=0"):
        generate("verifier=topk", "verifier.k=0")


@pytest.mark.real
@pytest.mark.slow
def test_the_example_with_a_real_model_runs(
    beside: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SPECDEC_CACHE", raising=False)
    if not PACKAGES["smollm2"].path.is_file():
        pytest.skip("specdec models install smollm2")
    runpy.run_path(str(EXAMPLES / "real_model.py"), run_name="__main__")
    assert re.search(r"echo +True.*numerics +passed", capsys.readouterr().out, re.DOTALL)
