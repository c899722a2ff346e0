"""The attention function: its two implementations, packed requests, and where it is called."""

import torch

from specdec.attention.backends import masked_lse


def test_attention_with_its_log_sum_exp():
    """Attention over the visible slots, for query heads that share keys."""
    rows, slots, split, generator = 5, 23, 14, torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, rows, 8, generator=generator, dtype=torch.float64)
    stored = torch.randn(2, 1, 2, slots, 8, generator=generator, dtype=torch.float64)
    hidden = torch.rand(rows, slots, generator=generator) < 0.5
    hidden[:, :split] = False
    hidden[torch.arange(rows), torch.arange(split, split + rows)] = False  # a row sees itself
    key, value = stored.repeat_interleave(2, 2)
    scores = (query @ key.transpose(2, 3) * 8**-0.5).masked_fill(hidden, -torch.inf)
    out, lse = masked_lse(query, *stored, ~hidden, None)
    assert (out - scores.softmax(-1) @ value).abs().max() < 1e-13
    assert (lse - scores.logsumexp(-1)).abs().max() < 1e-13
