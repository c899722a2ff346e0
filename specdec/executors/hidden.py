"""Hidden states that leave an executor with its answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from specdec.executors.layout import row_items
from specdec.hidden import PromptHidden
from specdec.types import Batch, Output


def with_hidden(output: Output, batch: Batch, captured: Mapping[int, torch.Tensor]) -> Output:
    """The output of a batch that has passed the target, with the hidden states of its rows.

    Args:
        output: one ``Answers`` per request with tree rows, in the order of ``batch.trees``.
        batch: what was answered.
        captured: layer -> [sum of rows, E] in packing order.
    """
    answers = {found.request: found for found in output.answers}
    prompts, start = [], 0
    for item in row_items(batch):
        middle, stop = start + len(item.prefill_tokens), start + item.num_rows
        if item.prefill is not None:
            layers = {layer: hidden[start:middle] for layer, hidden in captured.items()}
            prompts.append(
                PromptHidden(request=item.request, start=item.prefill.start, layers=layers)
            )
        if item.tree is not None:
            rows = {layer: hidden[middle:stop] for layer, hidden in captured.items()}
            answers[item.request] = replace(answers[item.request], hidden=rows)
        start = stop
    return replace(output, answers=tuple(answers.values()), prompts=tuple(prompts))
