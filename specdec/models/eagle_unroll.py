"""Outputs of an EAGLE head over a whole text, with its own outputs fed back.

This is the training-time test of EAGLE-3 (arXiv 2503.01840, section 3.2). At step 0 the head reads
the target's features at every position. At step s it reads, at chosen positions, its own outputs of
step s - 1 and the text's next token, as in decoding. The row of a chosen position attends to the
rows of step 0 up to that position and to the rows of steps 1 .. s that continue it.

Shape letters: B sequences, S positions, T = S - 1 rows, A chosen rows, E hidden size, F size of a
feature, H query heads, G key/value heads, D head size.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from specdec.models.eagle import EagleHead, causal


class _Unrolled:
    def __init__(self) -> None:
        self._first: dict[int, tuple[Tensor, Tensor]] = {}  # layer -> keys, values of step 0
        self._own: dict[int, list[tuple[Tensor, Tensor]]] = {}  # layer -> those of later steps
        self._visible_AT: Tensor | None = None

    def first(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self._first[layer], self._own[layer] = (key, value), []
        return causal(layer, query, key, value)

    def choose(self, rows_A: Tensor) -> None:
        length = next(iter(self._first.values()))[0].shape[2]
        columns_T = torch.arange(length, device=rows_A.device)
        self._visible_AT = columns_T <= rows_A[:, None]

    def later(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = self._first[layer]
        own = self._own[layer]
        own.append((key, value))
        query = query.unflatten(1, (keys.shape[1], -1)) / query.shape[-1] ** 0.5  # B G H/G A D
        scores = query @ keys[:, :, None].transpose(-1, -2)
        assert self._visible_AT is not None
        scores = scores.masked_fill(~self._visible_AT, -torch.inf)
        along = [(query * k[:, :, None]).sum(-1, keepdim=True) for k, _ in own]
        weights = torch.cat([scores, *along], -1).float().softmax(-1).to(values.dtype)
        length = keys.shape[2]
        out = weights[..., :length] @ values[:, :, None]
        for step, (_, v) in enumerate(own):
            out = out + weights[..., length + step, None] * v[:, :, None]
        return out.flatten(1, 2).transpose(1, 2)


def unroll(
    head: EagleHead, tokens_BS: Tensor, features: Tensor, steps: int, rows_A: Tensor | None = None
) -> Iterator[Tensor]:
    """Yields the head's outputs of each step, [B, T, E] for step 0, then [B, A, E].

    Row i of step s embeds token i + 1 + s of ``tokens_BS`` and predicts the next token, with the
    target's ``features`` [B, S, F] up to position i. Step 0 has rows for all positions but the
    last, later steps for ``rows_A``, int64[A], within (default: all of) 0 .. S - 1 - ``steps``.
    """
    attention = _Unrolled()
    length = tokens_BS.shape[1] - 1
    positions = torch.arange(length, device=tokens_BS.device)
    if rows_A is None:
        rows_A = positions[: length + 1 - steps]
    states = head.states(features[:, :-1])
    outputs = head(tokens_BS[:, 1:], states, positions[None], attention.first)
    yield outputs
    attention.choose(rows_A)
    outputs = outputs[:, rows_A]
    for step in range(1, steps):
        states, at = head.fed_back(outputs), rows_A + step
        outputs = head(tokens_BS[:, at + 1], states, at[None], attention.later)
        yield outputs
