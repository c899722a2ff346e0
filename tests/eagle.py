"""EAGLE heads for tests: every variant with random weights, and trained ones of the toy target."""

from functools import cache
from typing import Any, Literal

import torch
from torch import nn
from transformers import LlamaConfig, PreTrainedModel

from specdec.models.eagle import EagleConfig, EagleHead
from specdec.models.eagle_loading import fit_head, untrained_config
from specdec.models.slicing import hidden_states
from specdec.pairs import RandomPair
from tests import toys

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 48,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "eagle1": {"version": 1, "layers": (3,), "own_output": False, "fc_bias": True},
    "eagle1 of two layers": {
        "version": 1,
        "layers": (3,),
        "own_output": False,
        "num_hidden_layers": 2,
    },
    "eagle3": {"version": 3, "layers": (0, 1, 2), "draft_vocab_size": 20},
    "eagle3 of two layers": {"version": 3, "layers": (0, 1, 2), "num_hidden_layers": 2},
    "normed residual": {"version": 3, "layers": (0, 1, 2), "norm_before_residual": True},
    "eagle3.1": {"version": 3, "layers": (0, 1, 2), "fc_norm": True, "norm_output": True},
    "one norm before fc": {"version": 3, "layers": (0, 1, 3), "norm_before_fc": True},
    "own embedding and biases": {
        **{"version": 3, "layers": (0, 1, 2), "own_embedding": True, "fc_bias": True},
        **{"attention_bias": True, "mlp_bias": True, "hidden_size": 24},
    },
}


def config(variant: str) -> EagleConfig:
    """A head of ``VARIANTS`` for a target of four layers, as ``tests.toys`` has."""
    return made({**SIZES, **VARIANTS[variant]})


def made(entries: dict[str, Any]) -> EagleConfig:
    """A config of fields of ``EagleConfig`` and entries of its layer's."""
    fields = {"target_hidden_size": 16, "draft_vocab_size": 48}
    fields |= {key: entries[key] for key in EagleConfig.__dataclass_fields__.keys() & entries}
    layer = {key: value for key, value in entries.items() if key not in fields}
    return EagleConfig(**fields, layer=LlamaConfig(**layer))


def random_head(
    wanted: EagleConfig,
    *,
    embedding: torch.Tensor | None = None,
    output: nn.Module | None = None,
    seed: int = 0,
) -> EagleHead:
    """A head of random weights in float64; a reduced vocabulary has every second token."""
    generator = torch.Generator().manual_seed(seed)
    if embedding is None:
        shape = wanted.layer.vocab_size, wanted.target_hidden_size
        embedding = torch.randn(shape, generator=generator, dtype=torch.float64)
    if output is None and not wanted.own_output:
        sizes = wanted.layer.hidden_size, wanted.layer.vocab_size
        output = nn.Linear(*sizes, bias=False, dtype=torch.float64)
        output.requires_grad_(False)
    head = EagleHead(wanted, embedding=embedding, output=output).double()
    with torch.no_grad():
        for parameter in head.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(noise * 0.3 + (parameter.dim() == 1))
    if wanted.draft_vocab_size < wanted.layer.vocab_size:
        head.target_ids = torch.arange(wanted.draft_vocab_size) * 2 + 1
    return head.requires_grad_(False).eval()


# Heads of the toy target.


class Pair(RandomPair):
    """The toy pair with another EAGLE head than an untrained one."""

    def __init__(self, head: EagleHead) -> None:
        super().__init__(**toys.MODEL)
        self.head = head

    def new_model(self, name: str) -> PreTrainedModel:
        """The toy target itself, which is made once."""
        return toys.pair().target if name == "target" else super().new_model(name)

    def eagle_head(self, version: Literal[1, 3]) -> EagleHead:
        return self.head


def features(head: EagleHead, tokens: torch.Tensor) -> torch.Tensor:
    """[B, T, S]: what the head reads of the toy target."""
    return hidden_states(toys.pair().target, tokens, head.config.names)[0]


def toy_head(version: Literal[1, 3], *, vocabulary: int | None = None) -> EagleHead:
    """An untrained head of the toy target, which reads its layers 0, 1 and 2 (version 3)."""
    target = toys.pair().target
    variants: dict[str, Any] = {"layers": (0, 1, 2)} if version == 3 else {}
    if vocabulary is not None:
        variants["draft_vocab_size"] = vocabulary
    torch.manual_seed(0)
    head = EagleHead(
        untrained_config(version, target.config, **variants),
        embedding=target.get_input_embeddings().weight.detach(),
        output=target.get_output_embeddings(),
    )
    if vocabulary is not None:
        head.target_ids = torch.arange(vocabulary)
    return head.double()


@cache
def trained_head(version: Literal[1, 3]) -> EagleHead:
    """A head that agrees with the toy target in about six of ten positions."""
    with torch.random.fork_rng(devices=[]):
        head = toy_head(version)
    return fit_head(head, toys.pair().target, sequences=96, length=20)
