"""A small family to train on: its files, and keys of the recipes that make them fast."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specdec.cli.main import main
from specdec.train import recipes
from specdec.train.corpus import Corpus, Document
from specdec.train.model import LanguageModel, ModelShape, save_hf
from specdec.train.tokenizer import save_tokenizer, train_tokenizer

SOURCE = '''def scaled(value, factor):
    """The product of a value and a factor, both of them numbers.

    Nothing is checked here.
    """
    return value * factor
'''
SIZES = {"hidden": 16, "feed_forward": 24, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8}
COMMON = ["compiled=false", "device=cpu", "num_processes=1", "num_threads=0", "precision=fp32"]
SAMPLING = [
    *("sampling.prompts=4", "sampling.gsm8k_prompts=0", "sampling.new_tokens=8"),
    "sampling.batch=4",
]
EVALUATION = ["evaluation.prompts={stdlib: 1}", "evaluation.new_tokens=6"]


def make_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A random 4-layer model with its tokenizer, and token streams; returns their places."""
    target = tmp_path / "own" / "target"
    save_tokenizer(train_tokenizer([SOURCE] * 3, 330), target, 1024)
    shape = ModelShape(num_layers=4, vocab_size=330, max_positions=1024, **SIZES)
    save_hf(LanguageModel(shape, generator=torch.Generator().manual_seed(0)), target)
    corpus = Corpus(licences={"stdlib": "PSF-2.0"})
    for number in range(40):
        text = SOURCE.replace("scaled", f"scaled_{number}")
        corpus.train += [Document("stdlib", kind, "a.py", text) for kind in ("file", "functions")]
        corpus.held_out.append(Document("stdlib", "file", "b.py", text))
    monkeypatch.setattr(recipes, "build_corpus", lambda **_: corpus)
    places = [f"work_dir={tmp_path / 'work'}", f"output_dir={tmp_path / 'own'}"]
    assert main(["train", "tokenizer", f"tokenizer={target}", *places]) == 0
    return places


def own(places: list[str]) -> Path:
    return Path(places[1].partition("=")[2])
