"""``model.exact=true``: tokens of plain decoding in 16 bits, and the check of it."""

from typing import Any

import numpy as np
import pytest
import torch

import specdec.attention.exact as exact_module
from specdec.attention.exact import BLOCK, Context
from specdec.attention.tree_attention import ScoreOptions, capped_attention
from specdec.certify import Check, numerics
from specdec.certify.certify import certify
from specdec.certify.numerics import plain_config
from specdec.config.job import run_job_of
from specdec.pairs import build_pair
from specdec.runs.runners import PartsRunner, TokenPrompt
from specdec.state import StopRules

MODEL = [
    "model=random",
    "model.num_layers=4",
    "model.draft_layers=2",
    "model.vocab_size=300",
    "model.dtype=bfloat16",
    "sampling=t06",
    "threads=1",
]
PIPELINE = ["executor.stages=2", "batch_size=4", "prefill_chunk=7"]
NUM_TOKENS = 48


def _config(name: str, *more: str, exact: bool) -> dict[str, Any]:
    words = [f"strategy={name}", *MODEL, f"model.exact={str(exact).lower()}", *more]
    cfg = run_job_of(words).config
    cfg["model"]["logit_scale"] = 4.0  # sharper: drafts are accepted
    return cfg


def _decode(cfg: dict[str, Any]) -> dict[int, tuple[int, ...]]:
    rng = np.random.default_rng(5)
    prompts = [TokenPrompt(i, rng.integers(0, 300, 20 + 30 * i)) for i in range(4)]
    stop = StopRules(max_new_tokens=NUM_TOKENS)
    runner = PartsRunner(cfg=cfg, pair=build_pair(cfg["model"]), stop=stop)
    outputs: dict[int, tuple[int, ...]] = {}
    runner.run(prompts, lambda result: outputs.update({result.id: result.output}))
    runner.close()
    return outputs


@pytest.mark.slow
def test_a_pipeline_with_batches_equals_plain_decoding():
    cfg = _config("specpipe_db", *PIPELINE, exact=True)
    assert _decode(cfg) == _decode({**plain_config(cfg), "batch_size": 1, "prefill_chunk": 512})


def test_the_check_does_not_apply_without_it():
    report = certify(_config("best_first", exact=False), checks=["exact_dtype"])
    assert report.checks[0].result == "skipped"


def _checked() -> Check:
    cfg = _config("best_first", "data.limit=1", exact=True)
    cfg["model"]["hidden_size"] = 128
    return certify(cfg, checks=["exact_dtype"]).checks[0]


def _by_slot(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    context: Context,
    options: ScoreOptions,
) -> torch.Tensor:
    """A planted fault: one sum over all keys in the order of slots, with masks, in the dtype."""
    num_slots = key.shape[1]
    start = context.num_blocks * BLOCK if context.slots is not None else 0
    seen = torch.arange(num_slots) < (start or num_slots)
    seen = seen & (torch.arange(num_slots) <= context.positions[:, None])
    if context.slots is not None:
        for row, slots in enumerate(context.slots):
            seen[row, slots[: context.positions[row] + 1 - start]] = True
    mask = torch.zeros(seen.shape, dtype=query.dtype)
    mask = mask.masked_fill(~seen, torch.finfo(query.dtype).min)
    output = capped_attention(query[None], key[None], value[None], mask, options.scaling, None)
    return output[0].transpose(0, 1)


@pytest.mark.slow
def test_the_check_passes_and_finds_attention_by_slots(monkeypatch):
    """Planted behind a cached proof: tokens differ from plain decoding with the same attention.

    They do from token 11 (greedy) and 15 (sampled) on, so the planted run needs 40 tokens, not 160.
    """
    sound = _checked()
    assert sound.passed, sound.detail
    assert "no difference" in sound.detail
    monkeypatch.setattr(exact_module, "exact_attention", _by_slot)
    monkeypatch.setattr(numerics, "_EXACT_TOKENS", 40)
    check = _checked()
    assert check.passed is False
    assert "instead of" in check.detail
