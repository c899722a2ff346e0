"""Inspecting, loading and slicing models, and the error messages."""

import json
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from specdec.errors import UserError
from specdec.models.inspection import inspect_model
from specdec.models.loading import load_model
from specdec.models.random import random_model
from tests.shapes import runner_of


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders of random models: untied llama and gpt_neox in shards, tied qwen3, gpt2, opt."""
    folder = tmp_path_factory.mktemp("models")
    ties = {"llama": False, "gpt_neox": False, "qwen3": True, "gpt2": True, "opt": True}
    for family, tied in ties.items():
        options = {"tie_word_embeddings": tied}
        model = random_model(family, dtype="float32", options=options)
        model.save_pretrained(folder / family, max_shard_size="20KB")
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    """A private copy of a llama folder, to damage."""
    return Path(shutil.copytree(saved / "llama", tmp_path / "model"))


def _shard(folder):
    return sorted(folder.glob("*.safetensors"))[0]


def _stages(folder, cuts, **keys):
    """Each loaded without the layers of the others."""
    return [
        runner_of(load_model(folder, layers=(a, b), **keys), first_layer=a, last_layer=b)
        for a, b in pairwise(cuts)
    ]


def _logits(runners, tokens):
    hidden = None
    for runner in runners:
        rows = runner.new_cache(4).rows(prefix_tokens=tokens)
        output = runner.forward([rows], hidden=hidden)
        hidden = output.hidden
    return output.logits


TOKENS = np.arange(3, 12)


# Inspection.


def _cut(path):
    path.write_bytes(path.read_bytes()[:-10])


def _wreck_json(path):
    raw = bytearray(path.read_bytes())
    raw[8:12] = b"!!!!"
    path.write_bytes(bytes(raw))


def _wreck_shape(path):
    path.write_bytes(path.read_bytes().replace(b'"shape":[32', b'"shape":[31', 1))


@pytest.mark.parametrize("wreck", [_cut, _wreck_json, _wreck_shape])
def test_damaged_weights(copy, wreck):
    wreck(_shard(copy))
    with pytest.raises(UserError, match="is damaged") as error:
        inspect_model(copy)
    assert str(_shard(copy)) in str(error.value)


def test_empty_weights_file_and_lfs_pointer(copy):
    _shard(copy).write_bytes(b"")
    with pytest.raises(UserError, match="is damaged"):
        inspect_model(copy)
    _shard(copy).write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(UserError, match="git lfs pull"):
        inspect_model(copy)


def test_missing_shard_and_lying_index(copy):
    index = copy / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.extra.weight"] = _shard(copy).name
    index.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"lacks tensor 'model\.extra\.weight'"):
        inspect_model(copy)
    _shard(copy).unlink()
    with pytest.raises(UserError, match="is missing"):
        inspect_model(copy)


def test_only_pickles(copy):
    for file in copy.glob("*.safetensors*"):
        file.unlink()
    (copy / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"no safetensors weights \(only pytorch_model\.bin\)"):
        inspect_model(copy)


# Loading.


def test_load_model_refuses_incomplete_weights(copy):
    """transformers would initialise the missing layer at random and continue."""
    path = copy / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 5}))
    for load in (load_model, lambda folder: load_model(folder, layers=(3, 5))):
        with pytest.raises(UserError, match=r"lacks 9 tensors.*layers\.4"):
            load(copy)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "opt", "gpt_neox"])
def test_stages_equal_whole(saved, family):
    """Separately loaded stages, tied and untied, give the whole model's logits."""
    cuts = (0, 1, 3, 4)
    whole = load_model(saved / family, dtype="float64")
    expected = whole(torch.from_numpy(TOKENS)[None]).logits[0]
    stages = _stages(saved / family, cuts, dtype="float64")
    assert [(s.is_first, s.is_last) for s in stages] == [
        (first == 0, last == 4) for first, last in pairwise(cuts)
    ]
    assert (_logits(stages, TOKENS) - expected).abs().max() < 1e-12


def test_stage_holds_its_layers_only(saved):
    """Parameters of other stages are not allocated: they stay on meta."""
    stage = load_model(saved / "qwen3", layers=(1, 3))
    held = {name for name, p in stage.named_parameters() if not p.is_meta}
    assert {name.split(".")[2] for name in held if ".layers." in name} == {"1", "2"}
    assert {name for name in held if ".layers." not in name} == {"model.norm.weight"}
    assert not any(b.is_meta for b in stage.buffers())


def test_middle_stage_of_checkpoint_without_prefix(saved, tmp_path):
    """GPT-2 on the hub names its tensors without the base model's prefix."""
    folder = Path(shutil.copytree(saved / "gpt2", tmp_path / "gpt2"))
    model = load_model(folder)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    model.transformer.save_pretrained(folder, max_shard_size="20KB")
    path = folder / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"architectures": ["GPT2LMHeadModel"]})
    )
    assert "h.0.ln_1.weight" in inspect_model(folder).tensors
    expected = model(torch.from_numpy(TOKENS)[None]).logits[0]
    assert (_logits(_stages(folder, (0, 2, 4)), TOKENS) - expected).abs().max() < 1e-4
