"""Agreement of drafts and heads with the target's own continuations, inside and outside loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from specdec.data import DATASETS, load_prompts
from specdec.errors import UserError
from specdec.metrics.loops import repeated_ngrams
from specdec.train.model import LanguageModel
from specdec.train.samples import Sampling, generate, same_length_batches

BATCH = 12
"""Prompts per batch."""
RANKS = (1, 2, 4, 8, 16, 32)
"""Values of k for which top-k agreement is counted."""
SETTINGS = {
    "greedy": Sampling(temperature=0.0),
    "0.6/0.9/80": Sampling(temperature=0.6, top_p=0.9, top_k=80),
}
"""Sampling rules of the continuations, by temperature / top_p / top_k."""

RankTokens = Callable[[Tensor, int], Sequence[list[int]]]
"""Ranks of a sequence's tokens (0 first) by each measured model.

Called with int64 token ids [T] and the number of prompt tokens; a model may rank only the last of
the tokens after the prompt.
"""


def agreement_record(tokens: Sequence[tuple[int, bool]]) -> dict[str, Any]:
    """Number of tokens, share of them inside loops, and top-k agreement inside and outside.

    Args:
        tokens: for each token its rank in the measured model's distribution (0 first) and whether
            it is inside a loop, that is, ends an 8-gram already generated.

    Returns:
        "tokens", "loop_share", and "outside" and "inside": rates in [0, 1] per k of RANKS.
    """
    ranks_T, inside_T = np.asarray(tokens, np.int64).reshape(-1, 2).T
    inside_T = inside_T.astype(bool)

    def rates(mask_T: np.ndarray) -> list[float]:
        return [float((ranks_T[mask_T] < k).sum() / max(1, mask_T.sum())) for k in RANKS]

    return {
        "tokens": len(tokens),
        "loop_share": float(inside_T.sum() / max(1, len(tokens))),
        "outside": rates(~inside_T),
        "inside": rates(inside_T),
    }


def ranks_of(logits_TV: Tensor, tokens_T: Tensor) -> list[int]:
    """Rank, 0 first, of one token per row of logits."""
    chosen = logits_TV.gather(-1, tokens_T[:, None])
    return (logits_TV > chosen).sum(-1).tolist()


def draft_ranks(draft: LanguageModel) -> RankTokens:
    """Ranks by a draft."""

    def rank_tokens(tokens_T: Tensor, prompt_length: int) -> list[list[int]]:
        logits = draft(tokens_T[None, :-1])[0, prompt_length - 1 :]
        return [ranks_of(logits, tokens_T[prompt_length:])]

    return rank_tokens


@torch.no_grad()
def measure_agreement(
    target: LanguageModel,
    rank_tokens: RankTokens,
    prompts: Sequence[Tensor],
    sampling: Sampling,
    new_tokens: int,
    seed: int,
) -> list[dict[str, Any]]:
    """``agreement_record`` of each measured model, on the target's continuations of prompts.

    Prompts are processed in batches of BATCH of nearly equal length; the longer ones of a batch
    lose their first tokens. A continuation has at most `new_tokens` and ends with its end token.
    """
    totals: list[list[tuple[int, bool]]] = []
    generator = torch.Generator().manual_seed(seed)
    for group in same_length_batches([prompt.numpy() for prompt in prompts], BATCH):
        rows = generate(target, group, new_tokens, [sampling], generator, stop_at_end=True)
        for prompt, row in zip(group, rows, strict=True):
            ends = (row == 0).nonzero()
            new = row[: int(ends[0]) + 1] if len(ends) else row
            by_model = rank_tokens(torch.cat((prompt, new)).to(target.device), len(prompt))
            totals = totals or [[] for _ in by_model]
            loops = repeated_ngrams(new.tolist()).tolist()
            for total, ranks in zip(totals, by_model, strict=True):
                total += zip(ranks, loops[len(loops) - len(ranks) :], strict=True)
    return [agreement_record(total) for total in totals]


def agreement_by_data(
    target: LanguageModel,
    rank_tokens: RankTokens,
    tokenizer: Tokenizer,
    prompts: Mapping[str, int],
    new_tokens: int,
    seed: int,
) -> Iterator[list[dict[str, Any]]]:
    """Yields one record per measured model for each data set and each rule of SETTINGS.

    Args:
        target, rank_tokens, new_tokens, seed: see ``measure_agreement``.
        tokenizer: the target's.
        prompts: number of prompts by data set; absent data sets are skipped. Prompts that leave no
            room for new_tokens lose their first tokens.
    """
    max_prompt = target.shape.max_positions - new_tokens
    for name, limit in prompts.items():
        ids = [prompt[-max_prompt:] for prompt in prompts_of(name, tokenizer, limit)]
        for rule, sampling in SETTINGS.items() if ids else ():
            records = measure_agreement(target, rank_tokens, ids, sampling, new_tokens, seed)
            about = {"data": name, "prompts": len(ids), "sampling": rule}
            yield [{**about, **record} for record in records]


def check_data_name(name: str) -> None:
    """Raises UserError for a name that is not one of the library's data sets."""
    if name not in DATASETS:
        raise UserError(f"prompts of {name}: choose from {', '.join(DATASETS)}")


def prompts_of(name: str, tokenizer: Tokenizer, limit: int) -> list[Tensor]:
    """Token ids of a data set's first `limit` prompts; empty if the data set is absent.

    Raises:
        UserError: an unknown name.
    """
    check_data_name(name)
    try:
        prompts = load_prompts(name=name, limit=limit)
    except UserError:  # its files are not on this machine
        return []
    return [torch.tensor(tokenizer.encode(prompt.text).ids) for prompt in prompts]
