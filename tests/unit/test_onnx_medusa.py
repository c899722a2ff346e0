"""Medusa heads in ONNX Runtime equal eager ones up to rounding.

Both compute in float32; a wrong weight changes logits by more than 0.01 (see the planted faults),
rounding by less than 1e-4.
"""

from __future__ import annotations

import pytest
import torch

from specdec.api import Decoder
from specdec.clocks.meter import Meter
from specdec.errors import UserError
from specdec.models import onnx_graph, onnx_medusa
from specdec.models.medusa import MedusaHeads
from specdec.models.random import random_model
from specdec.pairs.random import build_random

pytest.importorskip("onnxruntime", reason="pip install specdec-lab[onnx]")

TOLERANCE = 1e-4
SIZES = {"dtype": "float32", "num_layers": 2, "hidden_size": 64}


def _weights(target, names):
    """Random weights of one head; those not named are the target's."""
    generator = torch.Generator().manual_seed(1)
    output = target.get_output_embeddings().weight
    width = output.shape[1]
    shapes = {"norm": (width,), "block": (width, width), "output": tuple(output.shape)}
    return {
        f"{name}.weight": 0.3 * torch.randn(shapes[name], generator=generator) for name in names
    }


HEADS = [("block",), (), ("norm", "block", "output")]


def _heads(family="llama", backend="onnx", heads=HEADS):
    target = random_model(family, **SIZES)
    weights = [_weights(target, names) for names in heads]
    return MedusaHeads(target=target, heads=weights, meter=Meter(), backend=backend)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_equals_eager(family):
    """Heads with their own norm, block and output, and with the target's; one row and several."""
    found, expected = _heads(family), _heads(family, "eager")
    generator = torch.Generator().manual_seed(2)
    kept = []
    for rows in (1, 3, 8):
        hidden = torch.randn(rows, 64, generator=generator)
        for number in range(1, len(HEADS) + 1):
            logits, eager = found.logits(number, hidden), expected.logits(number, hidden)
            assert eager.std() > 0.01
            assert (logits - eager).abs().max() < TOLERANCE
            kept.append((logits, logits.clone()))
    assert all(torch.equal(now, then) for now, then in kept), "a later pass changed them"


def test_heads_of_their_own_need_no_session_of_the_target():
    heads = _heads(heads=[("block", "output")])
    assert heads._onnx is not None
    assert heads._onnx._output is None


def _no_gate(writer, kind, *inputs, **options):
    kind = "Identity" if kind == "QuickGelu" else kind
    options = {} if kind == "Identity" else options
    return _op(writer, kind, *inputs, **options)


_op = onnx_graph.GraphWriter.op


@pytest.mark.parametrize(
    ("where", "name", "fault"),
    [
        (onnx_graph, "epsilon", lambda module: 0.1),
        (onnx_graph.GraphWriter, "op", _no_gate),
        (onnx_medusa.OnnxMedusa, "logits", lambda self, number, hidden: _last(self, hidden)),
    ],
)
def test_planted_faults_are_refused(monkeypatch, where, name, fault):
    """Making the heads compares the graphs with eager passes, and raises if they differ."""
    monkeypatch.setattr(where, name, fault)
    with pytest.raises(UserError, match="this Medusa head: its outputs differ by"):
        _heads()


_logits = onnx_medusa.OnnxMedusa.logits


def _last(heads, hidden):
    """Planted fault: the logits of the last head in place of the requested one's."""
    return _logits(heads, len(HEADS), hidden)


def test_an_unsupported_family_is_refused():
    """``onnx`` refuses it by name; with ``auto`` the pair runs everything in PyTorch."""
    with pytest.raises(UserError, match=r"Medusa heads: .*gpt2.*model.backend=eager"):
        _heads("gpt2", heads=[()])


@pytest.mark.parametrize("sampling", ["greedy", "t06"])
def test_outputs_are_those_of_plain_decoding(sampling):
    """Untrained heads: their proposals are poor, and every output is the target's own."""
    sizes = {**SIZES, "num_layers": 4, "vocab_size": 48}
    pair = build_random(backend="onnx", **sizes)
    words = [f"sampling={sampling}", "max_new_tokens=16"]
    outputs = []
    for name in ("ar", "medusa"):
        with Decoder([f"strategy={name}", *words], pair=pair) as decoder:
            outputs.append(decoder.generate([5, 6, 7, 8]).tokens)
            heads = getattr(decoder._runner.parts.source, "_heads", None)
            assert name == "ar" or heads._onnx is not None
    assert outputs[0] == outputs[1]
