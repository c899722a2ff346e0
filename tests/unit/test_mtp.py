"""MTP heads inside a target: equal to transformers' own."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from specdec.config.job import run_job_of
from specdec.errors import UserError
from specdec.models.inspection import inspect_model
from specdec.models.mtp import mtp_head
from specdec.pairs.pretrained import LoadedPair
from specdec.testing import RandomPair


def saved_target(folder: Path, mtp_layers: int = 1) -> Glm4MoeForCausalLM:
    """A tiny GLM-4 MoE on disk, with MTP layers in its checkpoint."""
    torch.manual_seed(0)
    config = Glm4MoeConfig(
        vocab_size=53,
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        max_position_embeddings=64,
        num_nextn_predict_layers=mtp_layers,
    )
    model = Glm4MoeForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    model.save_pretrained(folder)
    return model


def stored_mtp(folder: Path, target: Glm4MoeForCausalLM) -> MtpModel:
    """Random MTP weights, written into the checkpoint under the names that it has there."""
    mtp = MtpModel(target, 1).eval()
    last = target.config.num_hidden_layers
    own = {n: w for n, w in mtp.state_dict().items() if n.startswith("layers.0.")}
    tensors = load_file(folder / "model.safetensors")
    for name, weight in own.items():
        noise = torch.randn(weight.shape)
        weight.copy_(1 + 0.2 * noise if "norm" in name else 0.3 * noise)
        place = name.removeprefix("layers.0.").removeprefix("mtp_block.")
        place = place.replace("post_norm.", "shared_head.norm.")
        if ".experts.gate_up_proj" in place or ".experts.down_proj" in place:
            start = place.rpartition(".")[0]
            for number, part in enumerate(weight):
                names = ("gate_proj", "up_proj") if "gate_up" in place else ("down_proj",)
                for each, rows in zip(names, part.chunk(len(names)), strict=True):
                    tensors[f"model.layers.{last}.{start}.{number}.{each}.weight"] = (
                        rows.contiguous()
                    )
            continue
        tensors[f"model.layers.{last}.{place}"] = weight.clone().contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return mtp


def test_chains_equal_transformers_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own ``forward_layer``, applied repeatedly to its output, as our head's rows.

    transformers finds the layer by its number in the published checkpoints, which are deeper.
    """
    keys = [r"model\.layers\.2\..*"]
    monkeypatch.setattr(Glm4MoeForCausalLM, "_keys_to_ignore_on_load_unexpected", keys)
    saved_target(tmp_path)
    target = Glm4MoeForCausalLM.from_pretrained(tmp_path).eval()
    expected = stored_mtp(tmp_path, target)
    head = mtp_head(LoadedPair(target=target))
    tokens = torch.tensor([[3, 14, 15, 9, 26, 5, 35]])
    with torch.inference_mode():
        states = target(tokens, output_hidden_states=True).hidden_states[-1][:, :-1]
        places = torch.arange(1, 7)[None]
        cache = MtpCache(config=target.config.get_mtp_config())
        theirs = expected.forward_layer(0, states, places, cache, input_ids=tokens[:, 1:])
        ours = head(tokens[:, 1:], states, places - 1)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            head.logits(ours), expected._project_to_logits(theirs), rtol=1e-4, atol=1e-4
        )
        row, all_tokens, all_states = theirs[:, -1:], tokens[:, 1:], states
        for step in range(3):
            token = expected._project_to_logits(row).argmax(-1)
            place = torch.tensor([[7 + step]])
            all_tokens = torch.cat([all_tokens, token], 1)
            all_states = torch.cat([all_states, ours[:, -1:]], 1)
            row = expected.forward_layer(0, row, place, cache, input_ids=token)
            ours = head(all_tokens, all_states, torch.arange(all_tokens.shape[1])[None])
            torch.testing.assert_close(ours[:, -1:], row, rtol=1e-4, atol=1e-5)


def test_a_target_without_is_refused(tmp_path: Path) -> None:
    target = RandomPair(num_layers=2).target
    with pytest.raises(UserError, match="num_nextn_predict_layers"):
        mtp_head(LoadedPair(target=target.eval()))
    saved_target(tmp_path)  # the config promises a layer that the file does not have
    with pytest.raises(UserError, match="cannot be read"):
        mtp_head(LoadedPair(target=Glm4MoeForCausalLM.from_pretrained(tmp_path).eval()))


def test_a_target_without_mtp_layers_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    for layers in (0, 1):
        saved_target(tmp_path, layers).save_pretrained(tmp_path)
        assert inspect_model(tmp_path).has_mtp == bool(layers)
    run_job_of(["strategy=mtp", "model=random"])
