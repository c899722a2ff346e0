"""Quantised passes in ONNX Runtime: packed weights, models of a pair, tokens and refusals."""

import numpy as np
import pytest
import torch

from specdec.certify.certify import certify
from specdec.clocks.meter import Meter
from specdec.config.job import run_job_of
from specdec.errors import UserError
from specdec.models.execution import Execution
from specdec.models.onnx import graph as onnx_graph
from specdec.models.packing import BLOCK, num_bytes, packed, round_weights, rounded
from specdec.models.random import random_model
from specdec.models.runner import ModelRunner
from specdec.pairs.random import build_random

pytest.importorskip("onnxruntime", reason="pip install specdec-lab[onnx]")

PAIR = {"dtype": "float32", "hidden_size": 64, "num_layers": 3, "backend": "onnx"}
INT4 = {"quantization": "int4"}
BITS = pytest.mark.parametrize("bits", [4, 8])


def _runner(model, bits):
    execution = Execution(backend="onnx", bits=bits)
    return ModelRunner(model=model, name="target", meter=Meter(), execution=execution)


@BITS
@pytest.mark.parametrize("inputs", [64, 80])
def test_codes_and_scales_give_the_rounded_matrix(bits, inputs):
    """Decoded with numpy from MatMulNBits' layout; rounding moves a weight by at most a step."""
    weight = torch.randn(50, inputs, generator=torch.Generator().manual_seed(0))
    weight[0, :BLOCK] = 0.0
    codes, scales = packed(weight, bits)
    values = codes.astype(np.int64)
    if bits == 4:
        values = np.stack([values & 15, values >> 4], -1).reshape(50, -1, BLOCK)
    decoded = ((values - 2 ** (bits - 1)) * scales[..., None]).reshape(50, -1)[:, :inputs]
    ours = rounded(weight, bits)
    np.testing.assert_array_equal(decoded.astype(np.float32), ours.numpy())
    steps = np.repeat(np.abs(scales), BLOCK, 1)[:, :inputs]
    assert (np.abs(weight.numpy() - ours.numpy()) <= steps * 1.001).all()
    assert torch.equal(rounded(ours, bits), ours)
    again, _ = packed(ours, bits)
    np.testing.assert_array_equal(codes, again)


@BITS
@pytest.mark.parametrize("options", [{}, {"attention_bias": True, "tie_word_embeddings": False}])
def test_passes_are_those_of_the_rounded_weights(bits, options):
    """Up to the 8-bit rounding of activations: 1 / 254 of a block's largest, in 12 products."""
    model = random_model("llama", dtype="float32", hidden_size=80, num_heads=5, num_kv_heads=5)
    model = round_weights(model, bits)
    tokens = np.arange(20)
    runner = _runner(model, bits)
    found = runner.forward([runner.new_cache(20).rows(prefix_tokens=tokens)]).logits
    with torch.inference_mode():
        expected = model(torch.from_numpy(tokens)[None]).logits[0]
    assert 0.0 < (found - expected).abs().max() < 0.1 * expected.abs().max()
    table = model.get_input_embeddings().weight
    assert not torch.equal(model.get_output_embeddings().weight, table)  # embeddings stay float32
    assert num_bytes(model, bits) < sum(p.numel() * 4 for p in model.parameters())


def test_planted_faults_are_refused(monkeypatch):
    """A session without rounded activations is compared with the rounded torch model."""
    model = round_weights(random_model("llama", dtype="float32", hidden_size=64), 4)
    monkeypatch.setattr(onnx_graph, "packed", lambda weight, bits: packed(weight * 1.01, bits))
    with pytest.raises(UserError, match="its outputs differ by"):
        _runner(model, 4)


@pytest.mark.parametrize(
    ("kind", "bits"), [("int4", (4, 4)), ("int8", (8, 8)), ("draft_int4", (None, 4))]
)
def test_models_of_a_pair(kind, bits):
    """In int4 the output head and the down projections have 8 bits."""
    pair, plain = build_random(**PAIR, quantization=kind), build_random(**PAIR)
    for name, expected in zip(("target", "draft"), bits, strict=True):
        models = pair.model(name), plain.model(name)
        for matrix in ("lm_head", "model.layers.0.mlp.down_proj", "model.layers.0.mlp.up_proj"):
            weight, before = (model.get_submodule(matrix).weight for model in models)
            own = expected if matrix.endswith("up_proj") else expected and 8
            assert torch.equal(weight, before if own is None else rounded(before, own))
        assert (pair.weight_bytes[name] < plain.weight_bytes[name]) == (expected is not None)
        names = {node.op_type for node in _nodes(pair, name)}
        assert ("MatMulNBits" in names) == (expected is not None)


def _nodes(pair, name):
    from onnx import ModelProto

    runner = pair.runner(name, Meter())
    bits = pair.options.bits_of(name)
    return ModelProto.FromString(
        onnx_graph.build_graph(runner.backend.layers, bits).model
    ).graph.node


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int4", "draft_int4"])
def test_tokens_equal_plain_decoding_up_to_ties(kind):
    words = ["strategy=speculative", "model=tiny", "model.backend=onnx"]
    job = run_job_of([*words, f"model.quantization={kind}", "data.limit=2"], [])
    (check,) = certify(job.config, checks=["numerics"]).checks
    assert check.passed, check.detail
    assert check.detail.startswith("int") == (kind[0] == "i")


def test_refusals_name_the_remedy():
    with pytest.raises(UserError, match=r"quantization=int4 is not proved.*model.exact=false"):
        build_random(**PAIR, **INT4, exact=True)
    with pytest.raises(UserError, match=r"quantization=draft_int8 .*use model.backend=onnx"):
        build_random(**{**PAIR, "backend": "eager"}, quantization="draft_int8")
    assert build_random(**PAIR | {"backend": "auto"}, quantization="draft_int8").backend == "onnx"
    with pytest.raises(UserError, match=r"int4 needs ONNX Runtime: .*use model.quantization=none"):
        _ = build_random(**PAIR | {"backend": "auto", "dtype": "bfloat16", **INT4}).backend
