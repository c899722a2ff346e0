"""`specdec train finish`: marks of repeated n-grams, the loss, the rounds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from specdec.metrics.loops import repeated_ngrams
from specdec.train import cli, unlikelihood
from specdec.train.lm import Pretraining
from specdec.train.model import LanguageModel, ModelShape, load_hf, save_hf
from specdec.train.plan import Phase, RunPlan
from specdec.train.samples import Sampling, generate
from specdec.train.streams import Mixture, save_streams
from specdec.train.tokenizer import END, save_tokenizer, train_tokenizer
from specdec.train.unlikelihood import UnlikelihoodLoss, mark_repeated

VOCAB = 300
SIZES = {"hidden": 32, "feed_forward": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}


def toy() -> LanguageModel:
    shape = ModelShape(num_layers=2, vocab_size=VOCAB, max_positions=128, **SIZES)
    return LanguageModel(shape, generator=torch.Generator().manual_seed(0))


def plan(steps: int) -> RunPlan:
    phases = (Phase(until=1.0, layers=2, length=32, batch=8),)
    return RunPlan(phases=phases, max_steps=steps, warmup_steps=2, decay_from=0.9)


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(2, 4))
def test_a_token_is_marked_when_a_repetition_covers_it(tokens, n):
    """By the definition, quadratically: some n-gram over it stands at an earlier place too."""
    marked = mark_repeated(np.asarray(tokens, np.int64), vocab_size=10, ngram=n) >= 10
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    again = [i for i, gram in enumerate(grams) if gram in grams[:i]]
    assert marked.tolist() == [any(i <= t < i + n for i in again) for t in range(len(tokens))]


@pytest.mark.slow
def test_loops_fade_and_text_that_does_not_repeat_stays_likely(tmp_path):
    """A model of two lines: 1 to 10 over and over, and 50 to 249; the first is trained away."""
    lines = {"short": np.arange(4000) % 10 + 1, "long": np.arange(6000) % 200 + 50}
    streams = {name: line.astype(np.uint16) for name, line in lines.items()}
    both = Mixture(streams, {"short": 0.5, "long": 0.5}, 1)
    model = Pretraining(toy(), both, plan(100), tmp_path / "a").run()
    prompts = torch.arange(8)[:, None] + torch.arange(1, 4)

    def continued() -> tuple[np.ndarray, float]:
        generator = torch.Generator().manual_seed(1)
        new = generate(model, prompts, 40, [Sampling()], generator).numpy()
        return new, float(np.mean([repeated_ngrams(row.tolist(), 6).mean() for row in new]))

    new, before = continued()
    assert before > 0.4
    rows = [np.concatenate(([0], mark_repeated(row, vocab_size=VOCAB, ngram=6))) for row in new]
    samples = Mixture({"samples": np.concatenate(rows).astype(np.uint16)}, {"samples": 1.0}, 4)
    loss = UnlikelihoodLoss(samples, weight=1.0, batch=4, length=32)
    text = Mixture(streams, {"long": 1.0}, 2)
    inputs, targets = text.batch(8, 32)
    fluent = model.loss(inputs, targets).item()
    Pretraining(model, text, plan(40), tmp_path / "b", loss=loss).run()
    assert model.loss(inputs, targets).item() < fluent + 0.1
    assert continued()[1] < 0.4 * before


def test_without_marks_the_loss_is_that_of_the_text():
    """The control: what is not marked is not pushed anywhere."""
    rows = np.concatenate(([0], np.arange(1, 200), [0], np.arange(1, 200))).astype(np.uint16)
    plain = Mixture({"samples": rows}, {"samples": 1.0}, 4)
    model = toy()
    inputs, targets = Mixture({"text": rows}, {"text": 1.0}, 2).batch(4, 16)
    loss = UnlikelihoodLoss(plain, weight=3.0, batch=2, length=16)
    assert torch.equal(loss(model, inputs, targets), model.loss(inputs, targets))
    rows[1:] = np.where(rows[1:] > 0, rows[1:] + VOCAB, 0)
    loss = UnlikelihoodLoss(
        Mixture({"samples": rows}, {"samples": 1.0}, 4), weight=3.0, batch=2, length=16
    )
    assert loss(model, inputs, targets).item() > model.loss(inputs, targets).item()


def test_a_weight_must_be_positive():
    empty = Mixture({"samples": np.arange(9)}, {"samples": 1.0}, 1)
    with pytest.raises(ValueError, match=r"weight=0.0 cannot be used"):
        UnlikelihoodLoss(empty, weight=0.0, batch=1, length=4)


def test_a_blend_outside_the_two_models_is_refused():
    with pytest.raises(ValueError, match=r"blend=1.5 cannot be used"):
        cli.run("finish", {"output_dir": "", "seed": 1, "blend": 1.5})


def test_the_recipe_runs_its_rounds_and_goes_on(tmp_path, monkeypatch):
    """Weights change once per round; the same command again changes nothing."""
    source = '"""' + " Returns the area of a box.\n" + '"""\n    return width * height\n'
    tokenizer = train_tokenizer([source] * 3, 280)
    save_tokenizer(tokenizer, tmp_path / "out" / "target", 128)
    save_hf(toy(), tmp_path / "out" / "target")
    ids = Tokenizer.encode(tokenizer, source + END).ids
    stream = np.asarray(([0] + ids[:-1]) * 12, np.uint16)
    save_streams({"function": stream, "held_out": stream}, tmp_path / "work" / "tokens.npz")
    rule = {"temperature": 0.0}
    cfg = {
        "work_dir": str(tmp_path / "work"),
        "output_dir": str(tmp_path / "out"),
        "rounds": 2,
        "ngram": 3,
        "blend": 0.5,
        "sampling": {
            "prompts": 6,
            "gsm8k_prompts": 0,
            "new_tokens": 16,
            "batch": 3,
            "minutes": 1,
            "rules": [rule],
        },
        "weights": {"function": 1.0},
        "unlikelihood": {"weight": 1.0, "batch": 2, "length": 8},
        "plan": {
            "phases": [{"until": 1.0, "layers": 2, "length": 8, "batch": 2}],
            "max_steps": 3,
        },
        "seed": 1,
        "precision": "fp32",
        "compiled": False,
        "num_threads": 0,
        "num_processes": 1,
        "device": "cpu",
    }
    rounds = []
    monkeypatch.setattr(
        unlikelihood,
        "sample_target",
        lambda _, __, work, **kw: rounds.append(work.name) or np.arange(60, dtype=np.uint16),
    )
    cli.run("finish", cfg)
    assert rounds == ["0", "1"]
    done = load_hf(tmp_path / "out" / "target").state_dict()
    start = load_hf(tmp_path / "work" / "finish" / "start").state_dict()
    last = load_hf(tmp_path / "work" / "finish" / "1" / "model").state_dict()
    assert any(not torch.equal(last[name], start[name]) for name in done)
    for name, value in done.items():
        half = (0.5 * (start[name] + last[name])).to(torch.bfloat16).float()
        torch.testing.assert_close(value, half, msg=name)
    cli.run("finish", cfg)
    assert rounds == ["0", "1"]
