"""A pair whose Medusa heads differ, its hidden states by transformers alone, and requests.

Shape letters: T tokens, E hidden size.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from specdec.compose.workbench import Parts
from specdec.executors.models import A
from specdec.models.medusa import MedusaHeads
from specdec.pairs import ModelOptions
from specdec.policies import FixedWidth
from specdec.sampling.transform import SamplingParams
from specdec.state import DecodeState, StopRules
from specdec.testing import Case, RandomPair, decode_steps

LAYERS, WIDTH, VOCAB, HEADS = 4, 16, 24, 3
WARM = SamplingParams(temperature=0.7)
HISTORY = SamplingParams(temperature=0.9, no_repeat_ngram=2)


def own_heads(scale: float = 0.1) -> list[dict[str, torch.Tensor]]:
    """Weights that differ from head to head, so that no head can stand for another."""
    generator = torch.Generator().manual_seed(4)
    return [
        {"block.weight": scale * torch.randn(WIDTH, WIDTH, generator=generator)}
        for _ in range(HEADS)
    ]


class Pair(RandomPair):
    def __init__(self) -> None:
        sizes = {"hidden_size": WIDTH, "num_heads": 2, "vocab_size": VOCAB, "max_positions": 64}
        options = ModelOptions(dtype="float64", device="cpu", exit_layer=2, exit_head="norm")
        super().__init__(num_layers=LAYERS, seed=3, logit_scale=3.0, options=options, **sizes)

    def artefact(self, kind: type[A], **options: Any) -> A:
        if not issubclass(kind, MedusaHeads):
            return super().artefact(kind, **options)
        heads = own_heads()[: options["num_heads"]]
        return MedusaHeads(target=self.target, heads=heads, meter=options["meter"])  # type: ignore


def cases(num: int = 4, tokens: int = 12) -> list[Case]:
    """Prompts of 1 (no prefill at all), 5, 9, ... tokens, under all transforms."""
    stop = StopRules(max_new_tokens=tokens)
    rules = [WARM, SamplingParams(), HISTORY]
    return [Case(5 + i, "", tuple(range(2, 3 + 4 * i)), rules[i % 3], stop) for i in range(num)]


def states(models: RandomPair, tokens: np.ndarray) -> dict[int, torch.Tensor]:
    """layer -> [T, E] after it, by hooks on transformers' own model over the whole sequence."""
    found: dict[int, torch.Tensor] = {}

    def note(layer: int) -> Callable[..., None]:
        def hook(_module: object, _args: object, out: object) -> None:
            found[layer] = (out[0] if isinstance(out, tuple) else out)[0]  # type: ignore[index]

        return hook

    hooks = [
        layer.register_forward_hook(note(i)) for i, layer in enumerate(models.target.model.layers)
    ]
    with torch.inference_mode():
        models.target(torch.tensor(tokens[None]))
    for hook in hooks:
        hook.remove()
    return found


def steps(parts: Parts, state: DecodeState) -> None:
    """Decodes all cases, two at a time, prompts in chunks of 3."""
    for _ in decode_steps(parts, cases(), {}, batch_size=2, prefill_chunk=3, state=state):
        pass


def levels() -> FixedWidth:
    """Several levels in flight at a time, which are pruned there."""
    return FixedWidth(width=12, children=12, levels_per_step=1, depth=None)
