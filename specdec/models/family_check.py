"""Compares a runner of an untested family with transformers' own forward, when it is made."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.attention.kv_cache import Rows, TreeCache
from specdec.errors import UserError
from specdec.models.inspection import CERTIFIED

NUM_TOKENS = 8
"""Tokens of the comparison."""


def compare_with_transformers(
    model: PreTrainedModel, cache: TreeCache, logits_of: Callable[[Rows], Tensor | None]
) -> None:
    """Compares the logits of a few tokens, half of them tree nodes.

    Args:
        model: the whole model.
        cache: an empty one of the runner, of at least ``NUM_TOKENS`` slots.
        logits_of: rows -> [R, V], a pass of the runner.

    Raises:
        UserError: they differ by more than rounding.
    """
    embeddings: Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]
    tokens = np.arange(NUM_TOKENS) % model.config.get_text_config().vocab_size
    half = NUM_TOKENS // 2
    prefix = logits_of(cache.rows(prefix_tokens=tokens[:half]))
    nodes = np.arange(NUM_TOKENS - half)
    rows = cache.rows(
        node_ids=nodes,
        node_tokens=tokens[half:],
        parent_ids=nodes - 1,
        node_positions=half + nodes,
    )
    chain = logits_of(rows)
    assert prefix is not None and chain is not None  # noqa: PT018 - for mypy
    with torch.inference_mode():
        expected = model(torch.from_numpy(tokens).to(embeddings.device)[None]).logits[0]
    error = (torch.cat([prefix, chain]) - expected).abs().max().item()
    bound = max(torch.finfo(embeddings.dtype).eps, 1e-7) ** 0.5 * expected.abs().max().item()
    if not error <= bound:
        raise UserError(
            f"model type {model.config.model_type!r} cannot be used: its logits under tree "
            f"attention differ by {error:.2g} from transformers' own; use one of "
            f"{', '.join(sorted(CERTIFIED))}"
        )
