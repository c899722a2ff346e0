"""Sampling from a LanguageModel in batches: material for distillation and for n-gram counts.

Shape letters: B sequences, P prompt positions, T generated positions, V vocabulary; K, D as in
model.py, G query heads that share one key/value head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.errors import UserError
from specdec.train.model import LanguageModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """One way of picking the next token.

    Attributes:
        temperature: 0 is greedy.
        top_p: smallest set of tokens whose probability reaches it; 1 keeps all.
        top_k: most tokens kept, before top_p; 0 keeps all.
        share: share of sequences sampled this way, in a list of ways.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    share: float = 1.0

    def __post_init__(self) -> None:
        """Checks that there is something to draw from."""
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.top_k < 0 or self.share <= 0:
            raise UserError(
                f"temperature and top_k must be at least 0, top_p in (0, 1], share positive: {self}"
            )


def pick(logits_BV: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """Next tokens, int64 of shape (B,), under one sampling rule."""
    if sampling.temperature == 0.0:
        return logits_BV.argmax(-1)
    width = min(sampling.top_k or logits_BV.shape[-1], logits_BV.shape[-1])
    values, ids = (logits_BV.float() / sampling.temperature).topk(width, dim=-1)
    probs = values.softmax(-1)
    before = probs.cumsum(-1) - probs
    probs = probs.masked_fill(before >= sampling.top_p, 0.0)
    choice = torch.multinomial(probs, 1, generator=generator)
    return ids.gather(-1, choice).squeeze(-1)


class _Cache:
    def __init__(self, model: LanguageModel, batch: int, length: int) -> None:
        shape = model.shape
        size = (shape.num_layers, batch, shape.num_kv_heads, length, shape.head_dim)
        device = model.device
        self.keys = torch.zeros(size, dtype=model.dtype, device=device)
        self.values = torch.zeros(size, dtype=model.dtype, device=device)
        self.used = 0


def _forward(model: LanguageModel, tokens_BS: Tensor, cache: _Cache) -> Tensor:
    # Logits (B, V) of the last position. Either fills an empty cache or adds one position.
    start, end = cache.used, cache.used + tokens_BS.shape[1]
    assert start == 0 or end == start + 1
    cos, sin = model.cos[start:end], model.sin[start:end]  # type: ignore[index]
    x = F.embedding(tokens_BS, model.model.embed_tokens.weight)
    share = model.shape.num_heads // model.shape.num_kv_heads
    for index, layer in enumerate(model.model.layers):
        q, k, v = layer.queries_keys_values(x, cos, sin, model.dtype)  # type: ignore[operator]
        cache.keys[index, :, :, start:end] = k
        cache.values[index, :, :, start:end] = v
        if start == 0:
            k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            q_BKGD = q.reshape(q.shape[0], -1, share, q.shape[-1])
            keys, values = cache.keys[index, :, :, :end], cache.values[index, :, :, :end]
            mixed = F.scaled_dot_product_attention(q_BKGD, keys, values).reshape(q.shape)
        x = layer.finish(x, mixed, model.dtype)  # type: ignore[operator]
    cache.used = end
    return model.logits(x[:, -1:])[:, 0]


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompts_BP: Tensor,
    max_new_tokens: int,
    samplings: Sequence[Sampling],
    generator: torch.Generator,
    *,
    stop_at_end: bool = False,
) -> Tensor:
    """Continues prompts of one length; rows are dealt to `samplings` by their shares, in order.

    Args:
        model: on the CPU or a GPU; prompts are moved to it.
        prompts_BP: int64 token ids.
        max_new_tokens: T.
        samplings: the rules; shares are normalised.
        generator: of the CPU; the source of all draws.
        stop_at_end: once a row emits token 0, the rest of it is 0.

    Returns:
        New tokens, int64 of shape (B, T), on the CPU.

    Raises:
        UserError: the model has not so many positions.
    """
    batch, longest = prompts_BP.shape[0], prompts_BP.shape[1] + max_new_tokens
    if longest > model.shape.max_positions:
        raise UserError(
            f"{prompts_BP.shape[1]} prompt tokens and {max_new_tokens} new ones do not fit the"
            f" model's {model.shape.max_positions} positions: lower new_tokens"
        )
    shares = torch.tensor([s.share for s in samplings], dtype=torch.float64)
    bounds = [0, *(shares.cumsum(0) / shares.sum() * batch).round().long().tolist()]
    device = model.device
    cache = _Cache(model, batch, longest)
    logits = _forward(model, prompts_BP.to(device), cache).cpu()
    out = torch.zeros(batch, max_new_tokens, dtype=torch.long)
    ended = torch.zeros(batch, dtype=torch.bool)
    for position in range(max_new_tokens):
        for rule, low, high in zip(samplings, bounds, bounds[1:], strict=False):
            if high > low:
                out[low:high, position] = pick(logits[low:high], rule, generator)
        if stop_at_end:
            out[ended, position] = 0
            ended |= out[:, position] == 0
            if bool(ended.all()):
                break
        if position + 1 < max_new_tokens:
            last = out[:, position : position + 1].to(device)
            logits = _forward(model, last, cache).cpu()
    return out


def function_prompts(
    tokens: np.ndarray, is_prompt_end: Callable[[np.ndarray], int], limit: int, seed: int
) -> list[np.ndarray]:
    """Prompts cut from the start of training documents.

    Args:
        tokens: a stream, documents each preceded by token 0.
        is_prompt_end: length of the prompt in a document's ids, 0 to skip the document.
        limit: most prompts returned.
        seed: which documents, in which order.
    """
    starts = np.flatnonzero(tokens == 0)
    ends = np.append(starts[1:], len(tokens))
    prompts = []
    for index in np.random.default_rng(seed).permutation(len(starts)):
        document = tokens[starts[index] + 1 : ends[index]]
        length = is_prompt_end(document)
        if length:
            prompts.append(document[:length].astype(np.int64))
        if len(prompts) >= limit:
            break
    return prompts


def docstring_end(quote_ids: frozenset[int], longest: int = 192) -> Callable[[np.ndarray], int]:
    """Rule for function_prompts: a prompt ends with the second token that holds a triple quote.

    Args:
        quote_ids: ids of tokens with three double quotes in them.
        longest: a prompt of more tokens is skipped.
    """

    def end(document: np.ndarray) -> int:
        found = [i for i, t in enumerate(document[:longest].tolist()) if t in quote_ids][:2]
        return found[1] + 1 if len(found) == 2 and found[1] >= 8 else 0

    return end


def same_length_batches(prompts: list[np.ndarray], batch: int) -> list[Tensor]:
    """Groups prompts of nearly equal length; longer ones lose their first tokens.

    Returns int64 tensors of shape (batch, P), P differing; a last partial group is kept.
    """
    ordered = sorted(prompts, key=len)
    groups = [ordered[i : i + batch] for i in range(0, len(ordered), batch)]
    return [
        torch.from_numpy(np.stack([p[len(p) - len(group[0]) :] for p in group])) for group in groups
    ]
