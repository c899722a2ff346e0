"""Prompts: real ones on every machine, stable ids, and errors that say what to do."""

import ast
import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from specdec.data import fit_prompt, load_prompts
from specdec.data.stdlib import heads_of, is_held_out
from specdec.errors import UserError


def write_lines(path: Path, rows: list[object], *, compress: bool = False) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if compress:
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with three of the four file sets."""
    monkeypatch.setenv("SPECDEC_DATA", str(tmp_path))
    write_lines(
        tmp_path / "humaneval/HumanEval.jsonl.gz",
        [{"prompt": f"def f{i}():\n"} for i in range(3)],
        compress=True,
    )
    write_lines(tmp_path / "gsm8k/test.jsonl", [{"question": "1 + 1?"}, {"question": "2 + 2?"}])
    write_lines(tmp_path / "mt_bench/question.jsonl", [{"turns": ["Hello.", "Again."]}])
    return tmp_path


def test_stdlib_prompts_are_cut_right_before_the_body_of_held_out_functions() -> None:
    prompts = load_prompts(name="stdlib")
    assert len(prompts) >= 50
    assert [p.id for p in prompts] == list(range(len(prompts)))
    assert len({p.text for p in prompts}) == len(prompts)
    for prompt in prompts:
        path, name = prompt.source.split(":")
        assert is_held_out(path)
        assert 199 <= len(prompt.text) <= 600  # without the line break at the end
        assert prompt.text.isascii()
        # With any body the prompt is a whole program, and its last statement is the docstring.
        tree = ast.parse(prompt.text)
        last = tree.body[-1]
        if isinstance(last, ast.ClassDef):
            last = last.body[-1]
        assert isinstance(last, ast.FunctionDef)
        assert name.split(".")[-1] == last.name
        assert len(last.body) == 1
        assert ast.get_docstring(last)
    assert load_prompts(name="stdlib", limit=5) == prompts[:5]
    assert len({p.source.split(":")[0] for p in prompts[:8]}) >= 4  # a small limit mixes modules


def test_function_without_a_body_or_docstring_is_no_prompt() -> None:
    doc = '    """' + "word " * 60 + '"""\n'
    bare = f"def f(a):\n{doc}"
    assert list(heads_of(bare, "m.py")) == []
    assert list(heads_of("def f(a):\n    return 1\n", "m.py")) == []
    assert list(heads_of("def f(:\n", "m.py")) == []
    module = f"import os\nimport re\n\n@cache\ndef f(a):\n{doc}    return os.name\n"
    (head,) = heads_of(module, "m.py")
    assert head.text == f"import os\n\n\n@cache\ndef f(a):\n{doc}"
    (method,) = heads_of(f"class A(\n    B,\n):\n    def g(self):\n    {doc}        pass\n", "m.py")
    assert method.place == "m.py:A.g"
    assert method.text.startswith("class A(\n    B")


def test_loading_prompts_does_not_import_torch() -> None:
    """Bad input must be refused within seconds, so this path stays free of heavy imports."""
    code = (
        "import sys; from specdec.data import Request, check_data, load_prompts;"
        "check_data(Request(name='stdlib')); load_prompts(name='stdlib', limit=1);"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


def test_file_sets_apply_their_templates_and_read_gzip(folder: Path) -> None:
    # The line break at the end is cut off: tokenizers join it with the indentation behind it.
    assert [p.text for p in load_prompts(name="humaneval")] == [f"def f{i}():" for i in range(3)]
    assert load_prompts(name="gsm8k")[1].text == "Question: 2 + 2?\nAnswer:"
    assert load_prompts(name="mt_bench")[0].text == "USER: Hello.\nASSISTANT:"


def test_shuffling_keeps_ids_with_their_prompts(folder: Path, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "p.jsonl", [{"prompt": f"text {i}"} for i in range(40)])
    plain = load_prompts(name="jsonl", path=path)
    sample = load_prompts(name="jsonl", path=path, sample_seed=3, limit=10)
    assert [p.id for p in sample] != list(range(10))
    assert all(p == plain[p.id] for p in sample)
    assert sample == load_prompts(name="jsonl", path=path, sample_seed=3, limit=10)


def test_mixed_takes_turns_and_ids_do_not_depend_on_which_sets_are_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed = load_prompts(name="mixed")
    names = [p.name.split("/")[0] for p in mixed]
    assert names[:4] == ["stdlib", "humaneval", "gsm8k", "mt_bench"]
    assert names[4:8] == ["stdlib", "humaneval", "gsm8k", "stdlib"]
    assert len({p.id for p in mixed}) == len(mixed)
    before = {p.name: p.id for p in mixed}
    (folder / "gsm8k/test.jsonl").unlink()
    after = {p.name: p.id for p in load_prompts(name="mixed")}
    assert after.keys() < before.keys()
    assert all(before[name] == number for name, number in after.items())
    monkeypatch.delenv("SPECDEC_DATA", raising=False)
    assert {p.name.split("/")[0] for p in load_prompts(name="mixed")} == {"stdlib"}


def test_text_is_split_at_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text("\n\none\nstill one\n \ntwo\n", encoding="utf-8")
    prompts = load_prompts(name="text", path=path)
    assert [p.text for p in prompts] == ["one\nstill one", "two"]
    assert [p.source for p in prompts] == ["p.txt line 3", "p.txt line 6"]


def test_fit_prompt_drops_the_oldest_tokens_and_counts_them() -> None:
    tokens, cut = fit_prompt(range(10), max_len=4)
    assert (tokens.tolist(), cut) == ([6, 7, 8, 9], 6)
    assert fit_prompt([1, 2], max_len=2)[1] == 0
    with pytest.raises(UserError, match="10 tokens but only 4"):
        fit_prompt(range(10), max_len=4, truncation="error")
    with pytest.raises(UserError, match="no tokens"):
        fit_prompt([], max_len=4)
    with pytest.raises(UserError, match="max_new_tokens"):
        fit_prompt([1], max_len=0)
