"""Each planted bug is executed and changes the output; otherwise detecting it proves nothing."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from specdec.config.hydra import compose_config
from specdec.pairs import RandomPair, build_pair
from specdec.pairs.options import with_flat_options
from specdec.runs.runners import PartsRunner, TokenPrompt
from specdec.state import StopRules
from tests.planted.bugs import BUGS, SOUND, planted
from tests.planted.planting import SMALL
from tests.sampled import sampled

MAX_NEW_TOKENS = 24
PROMPTS = (
    TokenPrompt(7, np.array([3], np.int64)),
    TokenPrompt(2, np.array([5, 1, 4, 1, 5, 9, 2, 6, 5], np.int64)),
    TokenPrompt(4, np.array([8, 8, 3], np.int64)),
)

ENDS = frozenset(range(4, 32, 3))
"""End tokens for the bug about them; common enough to fall inside a path."""

UNSEEN = {
    "draft_cache_stale": "changes proposals, never outputs",
    "correction_from_target": "another output of the same distribution",
    "draft_probs_unprocessed": "another output of the same distribution",
    "accept_shares_draft_draw": "another output of the same distribution",
}
"""Bugs that do not show in a comparison of one output with plain decoding."""


class TiedPair(RandomPair):
    """Tokens 2 i and 2 i + 1 have equal logits in the target, so that every maximum is a tie."""

    def _make(self, num_layers: int) -> Any:
        model = super()._make(num_layers)
        with torch.no_grad():
            for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
                layer.weight[1::2] = layer.weight[::2]
        return model


@cache
def config(overrides: tuple[str, ...]) -> dict[str, Any]:
    return compose_config([*overrides, "batch_size=3", "prefill_chunk=4"]).values


@cache
def pair(tied: bool) -> RandomPair:
    keys = {k: v for k, v in config(SMALL)["model"].items() if k != "kind"}
    return with_flat_options(TiedPair)(**keys) if tied else build_pair(config(SMALL)["model"])


def outputs(name: str, overrides: tuple[str, ...]) -> dict[int, tuple[int, ...]]:
    """Outputs by prompt id with the current code."""
    stop = StopRules(
        max_new_tokens=MAX_NEW_TOKENS,
        eos_ids=ENDS if name == "eos_in_path_ignored" else frozenset(),
    )
    runner = PartsRunner(cfg=deepcopy(config(overrides)), pair=pair("tie" in name), stop=stop)
    by_prompt: dict[int, tuple[int, ...]] = {}
    runner.run(PROMPTS, lambda result: by_prompt.__setitem__(result.id, result.output))
    runner.close()
    return by_prompt


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(sorted({*BUGS} - SOUND), every=3))
def test_bug_runs_and_shows(name: str) -> None:
    overrides = BUGS[name].overrides
    right = outputs(name, overrides)
    with planted(name) as work:
        try:
            wrong = outputs(name, overrides)
        except (AssertionError, IndexError, RuntimeError, KeyError):
            wrong = {}
    assert work.fired, f"{name}: the planted code had no effect"
    if name not in UNSEEN:
        assert wrong != right, f"{name} does not change the output"
    assert outputs(name, overrides) == right, f"{name} was not removed"


def test_twelve_are_listed() -> None:
    assert sum(bug.listed for bug in BUGS.values()) == 12
