"""EAGLE-3 logits equal those of speculators, recorded by ``record_eagle3.py`` beside this file."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig

from specdec.models.eagle import EagleConfig, EagleHead
from specdec.models.eagle_loading import HeadFiles, load_head
from specdec.models.eagle_unroll import unroll

FOLDER = Path(__file__).with_name("eagle3")
VARIANTS = sorted(path.stem for path in FOLDER.glob("*.safetensors"))
CLOSE = {"rtol": 1e-4, "atol": 2e-5}  # float32 on both sides, sums of at most 48 terms
TARGET = LlamaConfig(hidden_size=16, num_hidden_layers=6, vocab_size=37, num_attention_heads=4)


def recorded(variant: str, **changes: Any) -> tuple[EagleHead, dict[str, Tensor]]:
    """A recorded head, perhaps under another reading of its flags, and its inputs and logits."""
    files = HeadFiles(FOLDER / variant)
    config = files.head_config(TARGET)
    flags = {key: changes.pop(key) for key in EagleConfig.__dataclass_fields__.keys() & changes}
    layer = LlamaConfig(**{**config.layer.to_dict(), **changes})
    config = replace(config, layer=layer, **flags)
    head = load_head(files, config, embedding=torch.zeros(37, 16), output=None)
    return head, load_file(FOLDER / f"{variant}.safetensors")


def first_logits(head: EagleHead, record: dict[str, Tensor]) -> Tensor:
    """Step 0: one causal pass over the target's features."""
    tokens, states = record["tokens"][None], head.states(record["hidden"])[None]
    return head.logits(head(tokens, states, torch.arange(len(record["tokens"]))[None]))[0]


def test_there_are_records_of_every_reading() -> None:
    flags = {flag for name in VARIANTS for flag, on in vars_of(name).items() if on is True}
    assert flags >= {"norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"}
    assert {vars_of(name)["norm_before_residual"] for name in VARIANTS} == {False, True}
    assert {vars_of(name)["draft_vocab_size"] for name in VARIANTS} == {23, 37}


def vars_of(variant: str) -> dict[str, Any]:
    config = HeadFiles(FOLDER / variant).head_config(TARGET)
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_the_references(variant: str) -> None:
    head, record = recorded(variant)
    torch.testing.assert_close(first_logits(head, record), record["logits"][0], **CLOSE)


@pytest.mark.parametrize("variant", VARIANTS)
def test_drafting_on_own_outputs_equals_the_references_steps(variant: str) -> None:
    """Row by row as in decoding: known rows, then rows that read the output of the row before."""
    head, record = recorded(variant)
    steps, length, _ = record["logits"].shape
    known = head.states(record["hidden"])
    for row in range(length - steps):
        states = known[: row + 1]
        for step in range(steps):
            tokens = record["tokens"][: row + 1 + step]
            outputs = head(tokens[None], states[None], torch.arange(len(tokens))[None])[0, -1:]
            torch.testing.assert_close(
                head.logits(outputs)[0], record["logits"][step, row], **CLOSE
            )
            states = torch.cat([states, head.fed_back(outputs)])


@pytest.mark.parametrize("variant", VARIANTS)
def test_steps_of_training_equal_the_references(variant: str) -> None:
    head, record = recorded(variant)
    steps, length, _ = record["logits"].shape
    tokens = torch.cat([torch.zeros(1, dtype=torch.long), record["tokens"]])[None]
    features = torch.cat([record["hidden"], torch.zeros(1, 48)])[None]
    rows = torch.arange(1, length + 1 - steps, 2)
    for step, outputs in enumerate(unroll(head, tokens, features, steps, rows)):
        expected = record["logits"][step] if step == 0 else record["logits"][step, rows]
        torch.testing.assert_close(head.logits(outputs)[0], expected, **CLOSE)


def test_the_reduced_vocabulary_is_read_as_offsets() -> None:
    head, record = recorded("plain")
    logits = head.target_logits(first_logits(head, record))
    stored = load_file(FOLDER / "plain" / "model.safetensors")
    inside = stored["t2d"]
    assert int(inside.sum()) == 23
    torch.testing.assert_close(logits[:, inside], record["logits"][0], **CLOSE)
    assert bool((logits[:, ~inside] == -torch.inf).all())


@pytest.mark.parametrize(
    "variant, change",
    [
        ("plain", {"norm_before_residual": True}),
        ("norm_before_residual", {"norm_before_residual": False}),
        ("plain", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
        ("scaled_rope", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
        ("plain", {"rms_norm_eps": 1.0}),
    ],
)
def test_another_reading_gives_other_logits(variant: str, change: dict[str, Any]) -> None:
    """The records would show each of these faults."""
    head, record = recorded(variant, **change)
    difference = (first_logits(head, record) - record["logits"][0]).abs().max()
    assert difference > 100 * CLOSE["atol"]


def test_feeding_back_before_the_norm_gives_other_steps() -> None:
    head, record = recorded("fc_norm", norm_output=False)
    tokens = torch.cat([torch.zeros(1, dtype=torch.long), record["tokens"]])[None]
    features = torch.cat([record["hidden"], torch.zeros(1, 48)])[None]
    first, second = unroll(head, tokens, features, 2)
    torch.testing.assert_close(head.logits(first)[0], record["logits"][0], **CLOSE)
    difference = head.logits(second)[0] - record["logits"][1, : second.shape[1]]
    assert difference.abs().max() > 100 * CLOSE["atol"]
