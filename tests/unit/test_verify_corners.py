"""The certificate in full caches, among tokens without text, and without a miss for long."""

from __future__ import annotations

import pytest

from specdec import state
from specdec.attention.kv_cache import TreeCache
from specdec.certify import Check, certify
from specdec.config.job import run_job_of
from specdec.serving.blocks import BlockBudget


def outcome(check: str, *overrides: str) -> Check:
    cfg = run_job_of(["model=random", *overrides]).config
    (found,) = certify(cfg, checks=[check]).checks
    return found


@pytest.mark.slow
def test_admission_without_the_tree_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    paged = ("strategy=best_first", "serving=paged", "serving.block_tokens=4")
    assert outcome("batch_independence", *paged).passed

    def need(self: BlockBudget, num_prompt: int, max_new_tokens: int) -> int:
        return -(-(num_prompt + max_new_tokens) // self.block_tokens)

    monkeypatch.setattr(BlockBudget, "need", need)
    found = outcome("batch_independence", *paged)
    assert found.passed is False
    assert "it exceeds the number it was admitted with" in found.detail


@pytest.mark.slow
def test_a_short_tail_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop string in as many tokens as it has letters, with others without text between."""
    monkeypatch.setattr(state, "_STOP_TAIL_TOKENS", 0)
    found = outcome("stop_rules", "strategy=speculative")
    assert found.passed is False
    assert "among tokens without text" in found.detail


@pytest.mark.slow
def test_a_cache_that_loses_its_origin_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Index arrays grow when a tree region has moved far, which only many hits in a row do."""
    honest = TreeCache._make_room

    def make_room(self: TreeCache, num: int) -> tuple[int, int]:
        origin, room = self._origin, honest(self, num)
        self._origin = origin
        return room

    monkeypatch.setattr(TreeCache, "_make_room", make_room)
    found = outcome("long_request", "strategy=specpipe", "executor.stages=3")
    assert found.passed is False
