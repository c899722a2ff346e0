"""Top-k agreement of drafts and heads with the target's own continuations.

Tokens inside loops (repetitions of earlier text) are counted apart, because they are easy to draft.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from experiments.tiny_family.model import LanguageModel
from experiments.tiny_family.samples import Sampling, generate, same_length_batches
from specdec.data import DATASETS, load_prompts
from specdec.errors import UserError
from specdec.metrics.loops import repeated_ngrams

BATCH = 12
RANKS = (1, 2, 4, 8, 16, 32)
"""Values of k for which top-k agreement is counted."""
SETTINGS = {
    "greedy": Sampling(temperature=0.0),
    "0.6/0.9/80": Sampling(temperature=0.6, top_p=0.9, top_k=80),
}
"""Sampling rules of the continuations, named by temperature / top_p / top_k."""

Predict = Callable[[Tensor], Sequence[tuple[int, Tensor]]]
"""Called with int64 token ids (1, T). Returns for each measured model its offset
(positions beyond the next token) and its float32 logits (T, V).
"""


def token_ranks(tokens_T: Tensor, logits_TV: Tensor, prompt_length: int, offset: int) -> list[int]:
    """Returns the ranks, from 0, of the tokens after a prompt in the predictions of a model."""
    first = max(0, prompt_length - 1 - offset)  # row that predicts the first new token
    chosen = tokens_T[first + 1 + offset :]
    logits_NV = logits_TV[first : first + len(chosen)]
    return (logits_NV > logits_NV.gather(-1, chosen[:, None])).sum(-1).tolist()


def _record(tokens: Sequence[tuple[int, bool]]) -> dict[str, Any]:
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


@torch.no_grad()
def measure_agreement(
    target: LanguageModel,
    predict: Predict,
    prompts: Sequence[Tensor],
    sampling: Sampling,
    new_tokens: int,
    seed: int,
) -> list[dict[str, Any]]:
    """Measures how often the token of the target's continuation is among each model's top k.

    Prompts are processed in batches of nearly equal length; the longer ones of a batch lose their
    first tokens. The result has per model "tokens", "loop_share" (of tokens that end an 8-gram
    already generated), and for "outside" and "inside" loops the agreement in [0, 1] per k of RANKS.
    """
    totals: dict[int, list[tuple[int, bool]]] = defaultdict(list)  # by index of the model
    generator = torch.Generator().manual_seed(seed)
    for group in same_length_batches([prompt.numpy() for prompt in prompts], BATCH):
        rows = generate(target, group, new_tokens, [sampling], generator, stop_at_end=True)
        for prompt, row in zip(group, rows, strict=True):
            ends = torch.isin(row, torch.tensor(target.ends)).nonzero()
            new = row[: int(ends[0]) + 1] if len(ends) else row
            loops = repeated_ngrams(new.tolist()).tolist()
            tokens = torch.cat((prompt, new)).to(target.device)
            for place, (offset, logits_TV) in enumerate(predict(tokens[None, :-1])):
                ranks = token_ranks(tokens, logits_TV, len(prompt), offset)
                totals[place] += zip(ranks, loops[len(loops) - len(ranks) :], strict=True)
    return [_record(total) for total in totals.values()]


def agreement_by_data(
    target: LanguageModel,
    predict: Predict,
    tokenizer: Tokenizer,
    prompts: Mapping[str, int],
    new_tokens: int,
    seed: int,
) -> Iterator[list[dict[str, Any]]]:
    """Yields ``measure_agreement`` for each data set of ``prompts`` and each rule of SETTINGS.

    Absent data sets are skipped; prompts without room for new_tokens lose their first tokens.
    """
    max_prompt = target.shape.max_positions - new_tokens
    for name, limit in prompts.items():
        ids = [prompt[-max_prompt:] for prompt in prompts_of(name, tokenizer, limit)]
        for rule, sampling in SETTINGS.items() if ids else ():
            records = measure_agreement(target, predict, ids, sampling, new_tokens, seed)
            about = {"data": name, "prompts": len(ids), "sampling": rule}
            yield [{**about, **record} for record in records]


def check_data_name(name: str) -> None:
    if name not in DATASETS:
        raise UserError(f"prompts of {name}: choose from {', '.join(DATASETS)}")


def prompts_of(name: str, tokenizer: Tokenizer, limit: int) -> list[Tensor]:
    """Tokenizes a data set's first `limit` prompts; empty if its files are absent."""
    check_data_name(name)
    try:
        prompts = load_prompts(name=name, limit=limit)
    except UserError:
        return []
    return [torch.tensor(tokenizer.encode(prompt.text).ids) for prompt in prompts]
