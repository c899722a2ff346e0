"""What transformers' ``generate`` prepares, as requests of the decode loop.

Processors and criteria are called once per node or token with the sequence that leads to it, so
they must depend on their arguments alone. Shape letters: B rows of the batch, T tokens, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    StoppingCriteriaList,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation import UnbatchedClassifierFreeGuidanceLogitsProcessor
from transformers.generation.stopping_criteria import MaxLengthCriteria

from specdec.errors import UserError
from specdec.runs.runners import TokenPrompt
from specdec.sampling.transform import SamplingParams
from specdec.state import RequestState, StopRules

Processor = Callable[[Any, Any], Any]

_WITH_MEMORY = (UnbatchedClassifierFreeGuidanceLogitsProcessor, SynthIDTextWatermarkLogitsProcessor)
_WARPERS = (
    (TopPLogitsWarper, "top_p", 0.0),
    (TopKLogitsWarper, "top_k", 0),
    (TemperatureLogitsWarper, "temperature", 1e-6),
)
"""The last processors in reverse order, their key of ``SamplingParams``, and a bound of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CriteriaStop(StopRules):
    """Stops where transformers' criteria do, asked after every emitted token.

    Attributes:
        criteria: called with all tokens of the row, int64[1, T], padding included, and no scores.
        row: int64[T], padding and prompt.
    """

    criteria: StoppingCriteriaList
    row: Tensor

    def reason(self, output: Sequence[int]) -> str | None:
        """ "eos", "length" or "criteria"; None if the row is not complete."""
        new = torch.tensor(output, dtype=self.row.dtype, device=self.row.device)
        if not bool(torch.as_tensor(self.criteria(torch.cat([self.row, new])[None], None)).any()):
            return "length" if len(output) >= self.max_new_tokens else None
        if output[-1] in self.eos_ids:
            return "eos"
        return "length" if len(output) >= self.max_new_tokens else "criteria"


@dataclass(frozen=True, slots=True, eq=False)  # hashed by identity, as processors are
class _InBatch:
    """Processors of a batch for one of its rows.

    Some hold a value per row, or count the padding; so they get a batch in which every row is this
    one, with its padding.
    """

    processors: LogitsProcessorList
    row: int
    num_rows: int
    padding: Tensor

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        whole = torch.cat([self.padding[None], input_ids], dim=1).repeat(self.num_rows, 1)
        scored: Tensor = self.processors(whole, scores.repeat(self.num_rows, 1))
        return scored[self.row, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The rows of a call of ``generate``.

    Attributes:
        input_ids: int64[B, T], padded on the left.
        padding: number of padding tokens of each row.
        processors, criteria: as prepared by ``generate``, the warpers of sampling included.
        samples: whether tokens are drawn.
        max_length: of a row, padding and prompt included.
        eos_ids, pad: tokens that end a row, and the token after its end.
    """

    input_ids: Tensor
    padding: Sequence[int]
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    samples: bool
    max_length: int
    eos_ids: frozenset[int]
    pad: int

    @classmethod
    def of(
        cls,
        input_ids: Tensor,
        padding: Sequence[int],
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
    ) -> Batch:
        """The batch of a prepared call.

        Raises:
            UserError: a processor that remembers the tokens of earlier calls, which the branches of
                a tree do not share.
        """
        for processor in processors:
            if isinstance(processor, _WITH_MEMORY):
                raise UserError(
                    f"{type(processor).__name__} remembers the tokens of earlier calls, which the"
                    " branches of a token tree do not share: leave it out"
                )
        lengths = [c.max_length for c in criteria if isinstance(c, MaxLengthCriteria)]
        # The pad token is prepared by ``generate``: the end token by default.
        return cls(
            input_ids=input_ids,
            padding=padding,
            processors=processors,
            criteria=criteria,
            samples=bool(config.do_sample),
            max_length=min(lengths, default=config.max_length),
            eos_ids=frozenset(_ids(config.eos_token_id)),
            pad=next(iter(_ids(config._pad_token_tensor)), 0),
        )

    def prompts(self) -> list[TokenPrompt]:
        """The rows without their padding; ids are row numbers."""
        rows = zip(self.input_ids.cpu().numpy(), self.padding, strict=True)
        return [TokenPrompt(i, np.array(row[pad:], np.int64)) for i, (row, pad) in enumerate(rows)]

    def request(self, prompt: TokenPrompt, arrival_s: float) -> RequestState:
        """The request of a row, which arrives at that second of the run's clock."""
        row = self.input_ids[prompt.id]
        return RequestState(
            request_id=prompt.id,
            prompt=prompt.tokens,
            stop=CriteriaStop(
                max_new_tokens=max(self.max_length - len(row), 1),
                eos_ids=self.eos_ids,
                criteria=self.criteria,
                row=row,
            ),
            sampling=self.sampling(prompt.id),
            arrival_s=arrival_s,
        )

    def sampling(self, row: int) -> SamplingParams:
        """How a row's tokens are chosen."""
        left, keys = list(self.processors), {"temperature": float(self.samples)}
        for kind, name, bound in _WARPERS if self.samples else ():
            last = left[-1] if left else None
            value = getattr(last, name, bound)
            if type(last) is kind and value > bound and _plain(last):
                keys[name] = value
                left.pop()
        pad, num_rows = self.padding[row], len(self.padding)
        if left and type(left[0]) is NoRepeatNGramLogitsProcessor and not pad:
            keys["no_repeat_ngram"] = left.pop(0).ngram_size
        processors: list[Processor] = list(left)
        if left and (pad or num_rows > 1):
            padding = self.input_ids[row, :pad]
            processors = [_InBatch(LogitsProcessorList(left), row, num_rows, padding)]
        return SamplingParams(**keys, processors=tuple(processors))  # type: ignore[arg-type]


def _ids(value: int | Sequence[int] | Tensor | None) -> list[int]:
    return [] if value is None else [int(i) for i in torch.as_tensor(value).flatten().tolist()]


def _plain(warper: Any) -> bool:
    """Whether a warper has the values that ``generate`` gives it without beams."""
    fills = getattr(warper, "filter_value", -float("inf"))
    return fills == -float("inf") and getattr(warper, "min_tokens_to_keep", 1) == 1
