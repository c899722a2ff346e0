"""Records logits of speculators' EAGLE-3 forward on small random heads.

    python3.11 -m venv scratch
    scratch/bin/pip install speculators==0.9.0 transformers==5.19.0 torch==2.13.0
    scratch/bin/python tests/parity/record_eagle3.py

writes eagle3/ beside this file: per variant a folder with the head as speculators saves it
(config.json, model.safetensors), and VARIANT.safetensors with

    hidden [T, F E]   the target's residual streams, one after the other
    tokens [T]        the token after each of them, which the head embeds
    logits [S, T, D]  at step s, when the head was fed its own output s times

At step s > 0 a position embeds the token s places later; the last s rows have no such token there
(speculators embeds token 0) and are not to be compared. Runs on speculators only; nothing of
this library is imported.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor
from transformers import LlamaConfig

FOLDER = Path(__file__).with_name("eagle3")
LENGTH, STEPS, WIDTH, VOCABULARY, REDUCED = 11, 4, 16, 37, 23

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
VARIANTS: dict[str, dict[str, object]] = {
    "plain": {},
    "norm_before_residual": {"norm_before_residual": True},
    "fc_norm": {"fc_norm": True, "norm_output": True},
    "norm_before_fc": {"norm_before_fc": True, "norm_before_residual": True},
    "two_layers": {"layers": 2, "norm_before_residual": True},
    "full_vocabulary": {"draft_vocab_size": VOCABULARY},
    "scaled_rope": {"rope": LLAMA3},
}


def config_of(values: dict[str, object]) -> Eagle3SpeculatorConfig:
    """The head's configuration: a Llama layer of few heads, and the flags of a variant."""
    flags = {key: value for key, value in values.items() if key not in ("layers", "rope")}
    layer = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=24,
        num_hidden_layers=values.get("layers", 1),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope_parameters=values.get("rope") or {"rope_type": "default", "rope_theta": 500.0},
    )
    layer._attn_implementation = "eager"
    proposal = GreedyTokenProposalConfig(speculative_tokens=STEPS)
    verifier = VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"])
    speculators = SpeculatorsConfig(
        algorithm="eagle3",
        proposal_methods=[proposal],
        default_proposal_method="greedy",
        verifier=verifier,
    )
    return Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        eagle_aux_hidden_state_layer_ids=[1, 2, 3],
        speculators_config=speculators,
        **{"draft_vocab_size": REDUCED, **flags},
    )


@torch.no_grad()
def random_head(config: Eagle3SpeculatorConfig, generator: torch.Generator) -> Eagle3DraftModel:
    """A head of normal weights; norms are about 1, so that an omitted one shows."""
    head = Eagle3DraftModel(config).float().eval()
    if head.use_draft_vocab:
        chosen = torch.randperm(VOCABULARY, generator=generator)[:REDUCED].sort().values
        t2d = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill(0, chosen, True)
        head.load_vocab_mappings(t2d, chosen - torch.arange(REDUCED))
    for name, weight in sorted(head.named_parameters()):
        noise = torch.randn(weight.shape, generator=generator)
        weight.copy_(1.0 + 0.4 * noise if "norm" in name else 0.35 * noise)
    return head


@torch.no_grad()
def logits_of(head: Eagle3DraftModel, hidden: Tensor, tokens: Tensor) -> Tensor:
    """Logits of each step of the forward, read from the output matrix."""
    seen: list[Tensor] = []
    hook = head.lm_head.register_forward_hook(lambda _module, _inputs, out: seen.append(out[0]))
    head(hidden[None], tokens[None], torch.zeros(1, LENGTH, dtype=torch.long), ttt_steps=STEPS)
    hook.remove()
    return torch.stack(seen)


def main() -> None:
    """Writes every variant."""
    for number, (name, values) in enumerate(VARIANTS.items()):
        generator = torch.Generator().manual_seed(number)
        head = random_head(config_of(values), generator)
        hidden = 2.0 * torch.randn(LENGTH, 3 * WIDTH, generator=generator)
        tokens = torch.randint(1, VOCABULARY, (LENGTH,), generator=generator)
        recorded = {
            "hidden": hidden,
            "tokens": tokens,
            "logits": logits_of(head, hidden, tokens),
        }
        head.save_pretrained(FOLDER / name)
        (FOLDER / name / "config.py").unlink(missing_ok=True)  # a copy of speculators' own module
        save_file(recorded, FOLDER / f"{name}.safetensors")


if __name__ == "__main__":
    main()
