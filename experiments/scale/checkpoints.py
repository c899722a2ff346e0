"""Writes a pair of random checkpoints with the shapes of real models.

    python -m experiments.scale.checkpoints --shape llama3-1b --out FOLDER [--layers N]

FOLDER/target and FOLDER/draft are sharded bfloat16 checkpoints with the same vocabulary. The draft
is the target's first layers with its embedding, norm and head. The outputs of the target's later
layers are scaled so that the most probable tokens of both agree at about ``--agreement`` of random
positions: with independent random weights no draft token would be accepted.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from experiments.gpu.shapes import LLAMA3_1B, LLAMA3_8B, LLAMA3_70B, TINY, Shape, llama_config

SHAPES = {shape.name: shape for shape in (LLAMA3_1B, LLAMA3_8B, LLAMA3_70B, TINY)}
_LOGIT_STD = 3.0  # of a random row of logits
_POSITIONS = 131_072
_SAMPLE = 64  # random tokens by which agreement is measured
_SEARCH_STEPS = 6
_SHARD = "1GB"


def random_target(shape: Shape, layers: int, seed: int = 0) -> LlamaForCausalLM:
    """A bfloat16 model whose layers, not the embedding, determine the next token."""
    some = replace(shape, layers=layers)
    config = llama_config(some, max_position_embeddings=_POSITIONS, dtype="bfloat16")
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    # Rotary frequencies are computed from the configuration, the weights drawn below.
    model = model.to_empty(device="cpu")
    model.tie_weights()
    fresh = LlamaForCausalLM(LlamaConfig.from_dict({**config.to_dict(), **_LEAST}))
    model.model.rotary_emb = fresh.model.rotary_emb
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.fill_(1.0)
                continue
            last = _LOGIT_STD if "embed" in name or "lm_head" in name else 1.0
            weight.normal_(0.0, last * weight.shape[1] ** -0.5, generator=generator)
    return model.eval()


_LEAST = {"num_hidden_layers": 1, "vocab_size": 8, "intermediate_size": 8}


def draft_of(target: LlamaForCausalLM, layers: int) -> LlamaForCausalLM:
    """The target's first layers, as a model that shares their weights."""
    config = LlamaConfig.from_dict({**target.config.to_dict(), "num_hidden_layers": layers})
    with torch.device("meta"):
        draft = LlamaForCausalLM(config)
    draft.model.embed_tokens, draft.model.norm = target.model.embed_tokens, target.model.norm
    draft.model.layers = target.model.layers[:layers]
    draft.lm_head, draft.model.rotary_emb = target.lm_head, target.model.rotary_emb
    return draft.eval()


def scale_late_layers(model: LlamaForCausalLM, first: int, factor: float) -> None:
    with torch.no_grad():
        for layer in model.model.layers[first:]:
            layer.self_attn.o_proj.weight.mul_(factor)
            layer.mlp.down_proj.weight.mul_(factor)


@torch.inference_mode()
def agreement(target: LlamaForCausalLM, draft: LlamaForCausalLM) -> float:
    """Share of positions of a random text at which both have the same most probable token."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, target.config.vocab_size, (1, _SAMPLE), generator=generator)
    first, second = (model(tokens).logits[0].argmax(-1) for model in (target, draft))
    return float((first == second).float().mean())


def agreeing_pair(
    shape: Shape, layers: int, draft_layers: int, wanted: float
) -> tuple[LlamaForCausalLM, LlamaForCausalLM, float]:
    """Target, draft and their agreement, by bisection over the scale of the late layers."""
    target = random_target(shape, layers)
    draft = draft_of(target, draft_layers)
    low, high, scale = 0.0, 1.0, 1.0
    found = agreement(target, draft)
    for _ in range(_SEARCH_STEPS):
        if abs(found - wanted) < 0.05:
            break
        low, high = (low, scale) if found < wanted else (scale, high)
        middle = (low + high) / 2
        scale_late_layers(target, draft_layers, middle / scale)
        scale, found = middle, agreement(target, draft)
    return target, draft, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), required=True)
    parser.add_argument("--layers", type=int, help="of the target; default: all of the shape")
    parser.add_argument("--draft-layers", type=int, default=0, help="default: a quarter")
    parser.add_argument("--agreement", type=float, default=0.75)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    layers = args.layers or shape.layers
    num_draft = args.draft_layers or max(1, layers // 4)
    target, draft, found = agreeing_pair(shape, layers, num_draft, args.agreement)
    for name, model in (("target", target), ("draft", draft)):
        model.save_pretrained(args.out / name, max_shard_size=_SHARD)
    facts = {
        "shape": {**asdict(shape), "layers": layers},
        "draft_layers": num_draft,
        "agreement": round(found, 3),
        "target_bytes": sum(p.numel() * 2 for p in target.parameters()),
        "draft_bytes": sum(p.numel() * 2 for p in draft.parameters()),
    }
    (args.out / "pair.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    print(facts)


if __name__ == "__main__":
    main()
