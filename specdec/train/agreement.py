"""Agreement of drafts and heads with the target's own continuations, inside and outside loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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


@dataclass(slots=True)
class Agreement:
    """Counts of target tokens by their rank in another model's distribution.

    A token is inside a loop when it ends an 8-gram already generated.

    Attributes:
        hits_inside, hits_outside: per entry of RANKS, tokens among the model's first k.
        inside, outside: tokens inside and outside loops.
    """

    hits_inside: list[int] = field(default_factory=lambda: [0] * len(RANKS))
    hits_outside: list[int] = field(default_factory=lambda: [0] * len(RANKS))
    inside: int = 0
    outside: int = 0

    def add(self, ranks: Sequence[int], loops: Sequence[bool]) -> None:
        """Counts one continuation: the rank of each token and whether it is inside a loop."""
        for rank, loop in zip(ranks, loops, strict=True):
            hits = self.hits_inside if loop else self.hits_outside
            for index, limit in enumerate(RANKS):
                hits[index] += rank < limit
            self.inside += loop
            self.outside += not loop

    def as_record(self) -> dict[str, Any]:
        """Number of tokens, share inside loops, and top-k agreement in [0, 1] per k of RANKS."""
        tokens = self.inside + self.outside
        return {
            "tokens": tokens,
            "loop_share": self.inside / max(1, tokens),
            "outside": [hits / max(1, self.outside) for hits in self.hits_outside],
            "inside": [hits / max(1, self.inside) for hits in self.hits_inside],
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


def continuations(
    target: LanguageModel,
    prompts: Sequence[Tensor],
    sampling: Sampling,
    new_tokens: int,
    seed: int,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields prompts and the target's continuations up to the end token, int64 each.

    Prompts are processed in batches of BATCH of nearly equal length; the longer ones of a batch
    lose their first tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    for group in same_length_batches([prompt.numpy() for prompt in prompts], BATCH):
        rows = generate(target, group, new_tokens, [sampling], generator, stop_at_end=True)
        for prompt, new in zip(group, rows, strict=True):
            ends = (new == 0).nonzero()
            yield prompt, new[: int(ends[0]) + 1] if len(ends) else new


@torch.no_grad()
def measure_agreement(
    target: LanguageModel,
    rank_tokens: RankTokens,
    prompts: Sequence[Tensor],
    sampling: Sampling,
    new_tokens: int,
    seed: int,
) -> list[Agreement]:
    """Agreement of each measured model with the target's ``continuations``.

    Args:
        target: the model that continues the prompts.
        rank_tokens: ranks by the measured models.
        prompts: int64 token ids each, at least one.
        sampling: rule of the continuations.
        new_tokens: largest number of tokens per continuation.
        seed: of the continuations.
    """
    totals: list[Agreement] = []
    for prompt, new in continuations(target, prompts, sampling, new_tokens, seed):
        all_ranks = rank_tokens(torch.cat((prompt, new)).to(target.device), len(prompt))
        totals = totals or [Agreement() for _ in all_ranks]
        loops = repeated_ngrams(new.tolist()).tolist()
        for total, ranks in zip(totals, all_ranks, strict=True):
            total.add(ranks, loops[len(loops) - len(ranks) :])
    return totals


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
        target: the model that continues the prompts; longer prompts lose their first tokens.
        rank_tokens: ranks by the measured models.
        tokenizer: the target's.
        prompts: number of prompts by data set; absent data sets are skipped.
        new_tokens: largest number of tokens per continuation.
        seed: of the continuations.
    """
    max_prompt = target.shape.max_positions - new_tokens
    for name, limit in prompts.items():
        ids = [prompt[-max_prompt:] for prompt in prompts_of(name, tokenizer, limit)]
        for rule, sampling in SETTINGS.items() if ids else ():
            totals = measure_agreement(target, rank_tokens, ids, sampling, new_tokens, seed)
            about = {"data": name, "prompts": len(ids), "sampling": rule}
            yield [{**about, **total.as_record()} for total in totals]


def check_data_name(name: str) -> None:
    """Raises UserError for a name that is not one of the library's data sets."""
    if name not in DATASETS:
        raise UserError(f"prompts of {name}: choose from {', '.join(DATASETS)}")


def prompts_of(name: str, tokenizer: Tokenizer, limit: int) -> list[Tensor]:
    """Token ids of a data set's first prompts; empty if the data set is absent.

    Args:
        name: one of the library's data sets.
        tokenizer: the family's.
        limit: largest number of prompts.

    Raises:
        UserError: an unknown name.
    """
    check_data_name(name)
    try:
        prompts = load_prompts(name=name, limit=limit)
    except UserError:  # its files are not on this machine
        return []
    return [torch.tensor(tokenizer.encode(prompt.text).ids) for prompt in prompts]
