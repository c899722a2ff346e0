"""Heads of checkpoints that this library did not write, as they are found in the world."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from specdec.cli.main import main
from specdec.models.eagle_loading import HeadFiles
from specdec.models.exits import head_model, read_head
from specdec.models.loading import load_model
from specdec.train.target import FrozenTarget, end_ids
from tests.training import COMMON, EVALUATION, SAMPLING, make_family, own

pytestmark = pytest.mark.slow

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 330,
    "max_position_embeddings": 1024,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "rope_parameters": LLAMA3,
        "eos_token_id": [2, 7],
    },
    "gemma2": {"eos_token_id": 2, "sliding_window": 8},
}


def foreign(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Places of a sharded random checkpoint of a family, and of streams in its tokenizer."""
    places = make_family(tmp_path, monkeypatch)
    target = own(places) / "target"
    (target / "model.safetensors").unlink()
    config = AutoConfig.for_model(family, **SIZES, **FAMILIES[family])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(target, max_shard_size="20KB")
    assert (target / "model.safetensors.index.json").exists(), "a sharded checkpoint"
    assert main(["train", "tokenizer", f"tokenizer={target}", *places]) == 0
    return places


def words(*more: str) -> list[str]:
    return [*COMMON, *EVALUATION, *more]


@pytest.mark.parametrize("family", FAMILIES)
def test_exit_and_eagle_heads_of_a_foreign_checkpoint(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trained, and taken by the decoder's own loaders; its end token separates texts."""
    places = foreign(family, tmp_path, monkeypatch)
    target, heads = own(places) / "target", own(places) / "heads"
    assert not (target / "model.safetensors").exists()
    with np.load(tmp_path / "work" / "tokens.npz") as streams:
        assert int(streams["stdlib"][0]) == 2
        assert not (streams["stdlib"] == 0).any()
    kinds = "heads=[{kind: transformer, layer: 1}, {kind: norm, layer: 2}]"
    short = ["plan.max_steps=2", "plan.length=32"]
    assert main(["train", "bundled_heads", *places, kinds, *SAMPLING, *words(*short)]) == 0
    model = load_model(target)
    for kind, layer in (("transformer", 1), ("norm", 2)):
        head = read_head(heads, kind, layer)
        assert head.tensors["output.weight"].shape == (330, 16)
        assert head_model(model, head)(input_ids=torch.arange(1, 9)[None]).logits.isfinite().all()
    phases = "plan.phases=[{until: 1.0, length: 32, batch: 2}]"
    few = [phases, "plan.max_steps=2", "loss.steps=2", "weights={samples: 0.5, stdlib: 0.5}"]
    assert main(["train", "eagle3_head", *places, *SAMPLING, *words(*few)]) == 0
    config = HeadFiles(own(places) / "eagle3").head_config(model.config)
    assert (config.vocab_size, config.hidden_size) == (330, 16)
    assert config.rope["rope_type"] == ("llama3" if family == "llama" else "default")


def test_every_stated_end_token_counts(tmp_path: Path) -> None:
    assert end_ids(tmp_path) == (0,), "a tokenizer alone is this library's"
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5]}))
    assert end_ids(tmp_path) == (5, 7)


def test_cached_sampling_equals_whole_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with sliding windows, whose caches transformers would cut."""
    from specdec.train.samples import Sampling, generate

    model = load_model(own(foreign("gemma2", tmp_path, monkeypatch)) / "target")
    target = FrozenTarget(model, ends=(2,), compute_dtype=torch.float32)
    prompts = torch.randint(3, 330, (2, 5), generator=torch.Generator().manual_seed(0))
    new = generate(target, prompts, 14, [Sampling()], torch.Generator())
    tokens = torch.cat([prompts, new], 1)
    with torch.no_grad():
        logits = model(input_ids=tokens).logits
    assert torch.equal(logits[:, 4:-1].argmax(-1), new)
