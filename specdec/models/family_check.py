"""Compares tree attention with transformers' own forward, for families that no test covers."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.clocks.meter import Meter
from specdec.errors import UserError
from specdec.models.inspection import CERTIFIED
from specdec.models.runner import ModelRunner
from specdec.types import TreeRows

_NUM_TOKENS = 8


def check_family(model: PreTrainedModel) -> None:
    """Refuses a model whose logits under tree attention differ from those of transformers' forward.

    Certified families are not compared, nor models of which only some layers are loaded.
    """
    kind = model.config.get_text_config().model_type
    if kind in CERTIFIED or any(p.is_meta for p in model.parameters()):
        return
    runner = ModelRunner(model=model, name="checked", meter=Meter())
    embeddings: Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]
    tokens = np.arange(_NUM_TOKENS) % runner.vocab_size
    half, nodes = _NUM_TOKENS // 2, np.arange(_NUM_TOKENS - _NUM_TOKENS // 2)
    cache = runner.new_cache(_NUM_TOKENS)
    found = [runner.forward([cache.rows(prefix_tokens=tokens[:half])]).logits]
    tree = TreeRows.within(
        prefix_len=half, node_ids=nodes, tokens=tokens[half:], parent_ids=nodes - 1
    )
    found.append(runner.forward([cache.rows(tree=tree)]).logits)
    with torch.inference_mode():
        expected = model(torch.from_numpy(tokens).to(embeddings.device)[None]).logits[0]
    both = torch.cat([logits for logits in found if logits is not None])
    error = (both - expected).abs().max().item()
    bound = max(torch.finfo(embeddings.dtype).eps, 1e-7) ** 0.5 * expected.abs().max().item()
    if not error <= bound:
        raise UserError(
            f"model type {kind!r} cannot be used: its logits under tree "
            f"attention differ by {error:.2g} from transformers' own; use one of "
            f"{', '.join(sorted(CERTIFIED))}"
        )
