"""Weight-only quantisation: stored bytes, errors, losslessness and error messages."""

from __future__ import annotations

import importlib.util

import pytest
import torch

import specdec
from specdec.models.exits import head_model, untrained_head
from specdec.models.loading import load_model
from specdec.models.quantize import num_bytes, quantize
from specdec.models.random import random_model
from specdec.pairs.random import build_random
from tests.pretrained import pretrained
from tests.stored import stored_parts

needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed"
)


def _model(**kwargs):
    return random_model("llama", num_layers=2, hidden_size=64, scale=0.1, **kwargs)


@needs_torchao
@pytest.mark.parametrize(("kind", "steps"), [("int8", 127), ("int4", 7)])
def test_layers_are_quantised_and_nothing_else(kind, steps):
    """An error of at most half a step of the largest weight, on the layers' matrices only."""
    plain, model = _model(), _model()
    assert quantize(model, kind) is model
    for (name, before), (_, after) in zip(
        plain.named_modules(), model.named_modules(), strict=True
    ):
        if not isinstance(before, torch.nn.Linear):
            continue
        inputs = torch.eye(before.in_features)
        error = (after(inputs) - before(inputs)).abs().max()
        bound = before.weight.abs().max() / steps / 2 * 1.2
        assert error == 0 if name == "lm_head" else 0 < error < bound
    assert num_bytes(model) < num_bytes(plain)


@needs_torchao
def test_a_quantised_pair_decodes_losslessly():
    """Over captured passes, too."""
    pair = build_random(
        num_layers=2, hidden_size=64, dtype="float32", quantization="int8", graphs="replay"
    )
    plain, ours = (
        specdec.generate([3, 4, 5], overrides=[f"strategy={name}", "max_new_tokens=16"], pair=pair)
        for name in ("ar", "speculative")
    )
    assert plain.tokens == ours.tokens
    assert pair.weight_bytes["target"] < num_bytes(
        build_random(num_layers=2, hidden_size=64, dtype="float32").target
    )


@needs_torchao
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_an_untrained_exit_head_has_the_quantised_weights(kind):
    """Also in a rank, which builds it in inference mode, where torchao's int8 has no ``to``."""
    with torch.inference_mode():
        model = quantize(_model(), kind)
        head = head_model(model, untrained_head(model, "transformer", 1))
    for own, shared in zip(
        head.model.layers[1].parameters(), model.model.layers[1].parameters(), strict=True
    ):
        assert type(own) is type(shared)
        assert all(map(torch.equal, stored_parts(own), stored_parts(shared)))


@needs_torchao
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_bytes_are_counted_from_one_layer(kind, tmp_path, monkeypatch):
    """A rank 0 that runs none of a 70B target has no memory for it."""
    from specdec.pairs import pretrained as pairs

    model = random_model("llama", num_layers=3, hidden_size=64, scale=0.1)
    model.save_pretrained(tmp_path)
    expected = num_bytes(pretrained(tmp_path, quantization=kind).target)

    def one_layer(*args, layers=None, **options):
        assert layers == (1, 2), "more than one layer is loaded"
        return load_model(*args, layers=layers, **options)

    monkeypatch.setattr(pairs, "load_model", one_layer)
    assert pretrained(tmp_path, quantization=kind).weight_bytes == {"target": expected}
