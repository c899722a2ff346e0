"""``model.dtype=auto``: the checkpoint's own type on a GPU, float32 elsewhere."""

import json

import pytest
import torch

from specdec.errors import UserError
from specdec.models.inspection import inspect_model
from specdec.models.loading import own_dtype
from specdec.models.random import random_model
from specdec.pairs.pretrained import build_pretrained
from tests.pretrained import models_made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("bfloat16")
    random_model("llama", dtype="bfloat16").save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("device", "given", "expected"),
    [
        ("cpu", "auto", "float32"),
        ("cuda", "auto", "bfloat16"),
        ("cuda:1", "auto", "bfloat16"),
        ("cuda", "float32", "float32"),
        ("cpu", "float64", "float64"),
    ],
)
def test_the_type_depends_on_the_device(folder, device, given, expected):
    assert build_pretrained(target=str(folder), device=device, dtype=given).dtype == expected


def test_a_run_on_a_gpu_by_default(folder, monkeypatch):
    """``device=auto``, which is the default, finds the GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    pair = build_pretrained(target=str(folder))
    assert (pair.device, pair.dtype) == ("cuda", "bfloat16")
    size = sum(p.numel() for p in random_model("llama").parameters())
    assert pair.weight_bytes["target"] == 2 * size


@pytest.mark.parametrize(("backend", "copies"), [("eager", 1), ("onnx", 2)])
def test_the_bytes_are_known_before_loading(tmp_path, backend, copies):
    """Sessions of ONNX Runtime have copies of the weights; no weight has been read."""
    model = random_model("llama", hidden_size=64)
    model.save_pretrained(tmp_path)
    pair = build_pretrained(target=str(tmp_path), device="cpu", dtype="float32", backend=backend)
    made, size = models_made(pair), sum(p.numel() for p in model.parameters())
    assert pair.needed_bytes == copies * 4 * size
    assert not made
    pair.model("target")
    assert made == ["target"]


def test_a_type_that_cannot_run_is_named_and_none_means_float32(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    name = "dtype" if "dtype" in config else "torch_dtype"
    (tmp_path / "config.json").write_text(json.dumps({**config, name: "float8_e4m3fn"}))
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(UserError, match="float8_e4m3fn"):
        own_dtype(inspect_model(tmp_path))
    without = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")}
    (tmp_path / "config.json").write_text(json.dumps(without))
    assert own_dtype(inspect_model(tmp_path)) == "float32"
