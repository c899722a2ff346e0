"""`specdec train finish`: marks of repeated n-grams, the loss, the rounds."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.train.model import LanguageModel, ModelShape
from specdec.train.plan import Phase, RunPlan
from specdec.train.streams import Mixture
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
