"""Which text is trained on, and what is kept out of it."""

import gzip
import json

import numpy as np
import pytest

from experiments.tiny_family import corpus, recipes

SOURCE = '''
def area(width: int, height: int) -> int:
    """Area of a rectangle.

    >>> area(2, 3)
    6
    """
    if width < 0 or height < 0:
        raise ValueError("negative side")
    return width * height
'''


def test_held_out_rule_is_fixed_and_small():
    """The rule is a promise to evaluation: these names were never trained on, in any version."""
    assert corpus.is_held_out("copy.py")
    assert corpus.is_held_out("http/server.py")
    assert corpus.is_held_out("http\\server.py")
    assert not corpus.is_held_out("json/decoder.py")
    files = corpus.python_files(corpus.stdlib_root())
    share = np.mean([corpus.is_held_out(name) for name, _ in files])
    assert 0.02 < share < 0.10


def test_corpus_keeps_held_out_files_out(tmp_path, monkeypatch):
    """Held-out files, copies of them under other names, and near copies never enter training."""
    library = tmp_path / "lib"
    (library / "http").mkdir(parents=True)
    texts = {
        name: SOURCE.replace("area", f"area_{i}") + body(i)
        for i, name in enumerate(["copy.py", "first.py", "second.py"])
    }
    for name, text in texts.items():
        (library / name).write_text(text)
    (library / "pilfered.py").write_text("# a copy\n" + texts["copy.py"])
    (library / "first_again.py").write_text(texts["first.py"].replace("negative", "bad"))
    monkeypatch.setattr(corpus, "stdlib_root", lambda: library)
    monkeypatch.delenv("SPECDEC_DATA", raising=False)
    built = corpus.build_corpus(packages={})
    assert {d.path for d in built.held_out} == {"copy.py"}
    assert {d.path for d in built.train} == {"first.py", "second.py"}
    assert built.dropped["near copy"] == 2
    assert {d.kind for d in built.train} == {"file", "functions"}


def body(seed: int) -> str:
    """Forty lines of code that differ between seeds."""
    rng = np.random.default_rng(seed)
    words = ["alpha", "beta", "gamma", "delta", "omega", "sigma", "kappa", "theta"]
    lines = [
        f"{words[a]}_{words[b]} = {words[c]}_{words[d]} + {words[e]}"
        for a, b, c, d, e in rng.integers(0, 8, (40, 5))
    ]
    return "\n".join(lines) + "\n"


def test_evaluation_text_is_dropped(tmp_path, monkeypatch):
    """A file that quotes thirteen words of an evaluation set is dropped, reworded ones stay.

    Plain files of the data folder count as gzipped ones do: they were once overlooked.
    """
    quoted = " ".join(f"word{i}" for i in range(20))
    (tmp_path / "quotes.py").write_text(f'"""{quoted}"""\n' + body(1))
    (tmp_path / "plain.py").write_text(body(2))
    monkeypatch.delenv("SPECDEC_DATA", raising=False)
    monkeypatch.setattr(corpus, "stdlib_root", lambda: tmp_path)
    data = tmp_path / "data"
    (data / "humaneval").mkdir(parents=True)
    row = json.dumps({"prompt": quoted[:60], "canonical_solution": quoted[60:]})
    for ending, opened in (("", open), (".gz", gzip.open)):
        path = data / "humaneval" / f"HumanEval.jsonl{ending}"
        with opened(path, "wt") as stream:
            stream.write(row + "\n")
        monkeypatch.setenv("SPECDEC_DATA", str(data))
        built = corpus.build_corpus(packages={})
        assert [d.path for d in built.train] == ["plain.py"]
        assert built.dropped["evaluation n-gram"] == 1
        assert built.kept_out == ["HumanEval"]
        assert "not available (SPECDEC_DATA): GSM8K's test questions" in recipes.excluded_sets(
            built
        )
        path.unlink()
    monkeypatch.delenv("SPECDEC_DATA")
    assert len(corpus.build_corpus(packages={}).train) == 2, "the control: it is the set that drops"


@pytest.mark.parametrize(
    ("licence", "allowed"),
    [
        ("BSD-3-Clause; BSD License", True),
        ("Apache 2.0", True),
        ("MPL-2.0 AND MIT", False),
        ("GPL-3.0-or-later", False),
        ("none stated", False),
    ],
)
def test_only_permissive_licences(licence, allowed):
    assert corpus.is_permissive(licence) is allowed
