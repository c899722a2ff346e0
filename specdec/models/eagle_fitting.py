"""Fits an EAGLE head to a small model in seconds, so that tests have accepted proposals.

Heads that are meant to be fast are trained by ``specdec train eagle3_head``.

Shape letters: B sequences, T tokens, S feature size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.models.eagle import EagleHead
from specdec.models.slicing import final_norm, layers_name
from specdec.types import HiddenName

_RATE = 2e-2


def fit_head(
    head: EagleHead,
    target: PreTrainedModel,
    *,
    sequences: int = 64,
    length: int = 16,
    steps: int = 40,
    seed: int = 0,
) -> EagleHead:
    """Trains a head in place on text that the target samples at temperature 1, and freezes it.

    It is teacher forced, with the cross-entropy to the target's distribution, for ``steps`` of Adam
    over all of the text. The head must have the target's whole vocabulary and dtype.
    """
    with torch.inference_mode(False):
        text = sampled_text(target, sequences, length, seed=seed)
        states, logits = hidden_states(target, text, head.config.names)
        goal, given = logits[:, 1:].softmax(-1), states[:, :-1]
        positions = torch.arange(length - 1, device=text.device)[None]
        head.requires_grad_(True)
        optimizer = torch.optim.Adam(head.parameters(), lr=_RATE)
        with torch.enable_grad():
            for _ in range(steps):
                outputs = head(text[:, 1:], head.states(given), positions)
                loss = -(goal * head.logits(outputs).log_softmax(-1)).sum(-1).mean()
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
    return head.requires_grad_(False).eval()


def sampled_text(target: PreTrainedModel, sequences: int, length: int, *, seed: int) -> Tensor:
    """Samples continuations of random first tokens at temperature 1, int64[B, T]."""
    generator = torch.Generator().manual_seed(seed)
    vocab_size = int(target.config.get_text_config().vocab_size)
    tokens = torch.randint(vocab_size, (sequences, 1), generator=generator)
    with torch.no_grad():
        while tokens.shape[1] < length:
            logits = target(tokens.to(target.device), use_cache=False).logits[:, -1]
            probs = logits.softmax(-1).cpu()
            tokens = torch.cat([tokens, torch.multinomial(probs, 1, generator=generator)], 1)
    return tokens.to(target.device)


def hidden_states(
    target: PreTrainedModel, tokens: Tensor, names: Sequence[HiddenName]
) -> tuple[Tensor, Tensor]:
    """Returns hidden states ``names``, concatenated to [B, T, S], and logits [B, T, V].

    They come from transformers' own forward on ``tokens``, int64[B, T].
    """
    found: dict[HiddenName, Tensor] = {}

    def note(name: HiddenName) -> Any:
        def hook(_module: Any, _args: Any, output: Any) -> None:
            found[name] = output[0] if isinstance(output, tuple) else output

        return hook

    layers: Any = target.get_submodule(layers_name(target))
    hooks = [
        (final_norm(target) if name.normed else layers[name.layer]).register_forward_hook(
            note(name)
        )
        for name in names
    ]
    try:
        with torch.no_grad():
            logits = target(tokens, use_cache=False).logits
    finally:
        for handle in hooks:
            handle.remove()
    streams = [found[name] for name in names]
    return torch.cat(streams, -1) if streams else logits[..., :0], logits
