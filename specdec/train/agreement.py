"""Counts how many of a drafter's greedy draft tokens equal the tokens of the target's answers.

Shape letters: T tokens of a text, K draft tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from specdec.metrics.loops import repeated_ngrams
from specdec.models.frozen import FrozenModel
from specdec.train.drafter import Drafter
from specdec.train.texts import AnsweredText


@dataclass(slots=True)
class Agreement:
    """Counts of matches between answers and chains of K greedy draft tokens, one chain per token.

    Attributes:
        tokens, looping: number of answer tokens, and of those that end a repeated 8-gram.
        passes: number of target passes that the answers need if each pass verifies one chain.
        tried, right: int[2, K]; at k, the chains whose first k tokens match, and those whose next
            token matches too. Row 1 counts chains that start with a looping token, row 0 others.
    """

    tokens: int
    looping: int
    passes: int
    tried: np.ndarray[Any, np.dtype[np.int64]]
    right: np.ndarray[Any, np.dtype[np.int64]]

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / max(1, self.passes)

    def to_json(self) -> dict[str, Any]:
        rates = (self.right / np.maximum(1, self.tried)).round(4)
        return {
            "tokens": self.tokens,
            "loop_share": round(self.looping / max(1, self.tokens), 4),
            "tokens_per_pass": round(self.tokens_per_pass, 4),
            "outside": rates[0].tolist(),
            "inside": rates[1].tolist(),
        }

    def __str__(self) -> str:
        shares = " ".join(f"{rate:.3f}" for rate in self.to_json()["outside"])
        passes = f"{self.tokens_per_pass:.2f} tokens per pass of a chain of {len(self.tried[0])}"
        return f"{passes}; right by position, outside loops: {shares}"


def measure(
    target: FrozenModel, drafter: Drafter, texts: Sequence[AnsweredText]
) -> dict[str, Agreement]:
    """Returns drafter name -> counts of matches of its greedy drafts with the texts' answers."""
    found: dict[str, Agreement] = {}
    for text in texts:
        tokens = torch.from_numpy(text.tokens.astype(np.int64)).to(target.device)
        for name, right_KT in drafter.right(target, tokens).items():
            zeros = np.zeros((2, len(right_KT)), np.int64)
            agreement = found.setdefault(name, Agreement(0, 0, 0, zeros, zeros.copy()))
            _add(agreement, right_KT.cpu().numpy(), text)
    return found


def _add(found: Agreement, right_KT: np.ndarray[Any, Any], text: AnsweredText) -> None:
    depth, length = right_KT.shape
    first, last = max(0, text.num_prompt - 1), length - 1  # roots: first .. last - 1
    inside = repeated_ngrams(text.tokens[first + 1 :].tolist())
    found.tokens += last - first
    found.looping += int(inside.sum())
    left_T = last - np.arange(length)  # tokens that the text has after each root
    exists_KT = np.arange(depth)[:, None] < left_T
    run_KT = np.logical_and.accumulate(right_KT & exists_KT, axis=0)
    before_KT = np.concatenate([np.ones_like(run_KT[:1]), run_KT[:-1]]) & exists_KT
    for place, chosen in enumerate((~inside, inside)):
        roots = np.flatnonzero(chosen) + first
        found.tried[place] += before_KT[:, roots].sum(1)
        found.right[place] += run_KT[:, roots].sum(1)
    root, accepted_T = first, run_KT.sum(0)
    while root < last:
        found.passes += 1
        root += int(accepted_T[root]) + 1
