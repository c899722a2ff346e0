"""Block drafters: parity with transformers, files, proposals, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, MuseGlimmerAssistantConfig
from transformers import MuseGlimmerAssistantModel as Assistant
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

from specdec.clocks.meter import Meter
from specdec.compose.workbench import Parts
from specdec.errors import UserError
from specdec.models.block import (
    BlockHead,
    BlockRunner,
    Kind,
    load_block,
    save_block,
    untrained_block,
)
from specdec.models.slicing import hidden_states
from specdec.policies import BestFirst, Chain, Static
from specdec.state import RequestState
from specdec.testing import RandomPair, decode_steps
from strategies.block import BlockSource
from tests.proposals import check_proposals
from tests.unit.heads import cases, steps

SIZES = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def target_model(layers: int = 6) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, num_hidden_layers=layers, head_dim=6)
    model = LlamaForCausalLM(config).double().eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(20)  # so that greedy choices do not hang on a rounding
    return model


def of_target(target: LlamaForCausalLM) -> dict[str, Any]:
    embedding = target.get_input_embeddings().weight.detach()
    return {"embedding": embedding, "output": target.get_output_embeddings()}


def drafts(head: BlockHead, target: LlamaForCausalLM, tokens: Tensor) -> list[int]:
    """The greedy drafts after ``tokens``, int64[T], whose last one is the anchor."""
    runner = BlockRunner(head, meter=Meter())
    context = runner.new_context()
    features = hidden_states(target, tokens[None, :-1], head.config.names)[0][0]
    for part in features.split(3):  # as features arrive while decoding
        runner.read(context, part)
    rows, found = runner.rows(context, int(tokens[-1])), [int(tokens[-1])]
    for row in rows:
        logits = runner.target_logits(runner.logits(row[None], torch.tensor(found[-1:])))
        found.append(int(logits.argmax()))
    return found[1:]


@pytest.mark.parametrize("layer_ids", [[1, 3], [0, 2, 5]])
def test_drafts_equal_transformers_token_for_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layer_ids: list[int]
) -> None:
    """Every block of a whole generation; layer 5 is the last, which is read after the norm."""
    target = target_model()
    config = MuseGlimmerAssistantConfig(
        **SIZES,
        head_dim=6,
        num_hidden_layers=2,
        block_size=5,
        mask_token_id=60,
        target_layer_ids=layer_ids,
        layer_types=["full_attention"] * 2,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
    )
    torch.manual_seed(1)
    assistant = Assistant(config).double().eval()
    with torch.no_grad():
        for name, weight in assistant.named_parameters():
            noise = torch.randn(weight.shape, dtype=torch.float64)
            weight.copy_(1 + 0.3 * noise if "norm" in name else 0.4 * noise)
    assistant.save_pretrained(tmp_path)
    head = load_block(tmp_path, target.config, **of_target(target))
    blocks: list[list[int]] = []
    original = DFlashTokenCandidateGenerator.get_candidates

    def recorded(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        found, logits = original(self, input_ids, *args, **kwargs)
        if logits is not None:
            start = input_ids.shape[1]
            assert found[0, start:].tolist() == drafts(head, target, input_ids[0])
            blocks.append(found[0, start:].tolist())
        return found, logits

    monkeypatch.setattr(DFlashTokenCandidateGenerator, "get_candidates", recorded)
    prompt = torch.tensor([[3, 14, 15, 9, 2, 6]])
    target.generate(
        prompt,
        assistant_model=assistant,
        speculation_type="dflash",
        do_sample=False,
        max_new_tokens=24,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert len(blocks) > 5
    assert len({token for block in blocks for token in block}) > 5
