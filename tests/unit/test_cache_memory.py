"""The target's caches reserve prompt, output and tree, and do not grow in a run."""

from copy import deepcopy

import pytest
import torch

from specdec.attention.tree_attention import CacheSpec, Contiguous
from specdec.executors.stage import ModelStage
from specdec.pairs import build_pair
from specdec.runs.runners import PartsRunner
from specdec.state import StopRules
from tests.matrix.cells import PROMPTS, Cell, base, config

NUM_TOKENS = 4
CELLS = [
    Cell("none", "root_only", "match", "local", "greedy"),
    Cell("draft_model", "static", "match", "pipeline", "greedy"),
]


def capacities(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """(reserved, allocated at the end, used at most) of every cache of the target in a run."""
    found: list[tuple[int, int, int]] = []
    used: dict[int, int] = {}
    opened, closed, ran = ModelStage.open, ModelStage.close, ModelStage.run
    reserved: dict[tuple[int, int], int] = {}

    def opening(self, request_id, max_len):
        opened(self, request_id, max_len)
        reserved[id(self), request_id] = max_len

    def running(self, batch, hidden, **options):
        out = ran(self, batch, hidden, **options)
        for request_id in {rows.request for rows in batch.trees}:
            cache = self.cache(request_id)
            key = id(self), request_id
            used[key] = max(used.get(key, 0), cache.cached_len + cache.num_nodes)
        return out

    def closing(self, request_id):
        key = id(self), request_id
        if key in used:
            found.append((reserved[key], self.cache(request_id).capacity, used[key]))
        closed(self, request_id)

    monkeypatch.setattr(ModelStage, "open", opening)
    monkeypatch.setattr(ModelStage, "run", running)
    monkeypatch.setattr(ModelStage, "close", closing)
    runner = composed(cell)
    runner.run(PROMPTS, lambda result: None)
    runner.close()
    return found


def composed(cell: Cell) -> PartsRunner:
    values = config(cell)
    values["serving"] = deepcopy(base()["serving"])  # without paged caches
    stop = StopRules(max_new_tokens=NUM_TOKENS)
    return PartsRunner(cfg=values, pair=build_pair(values["model"]), stop=stop)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell.policy}-{cell.executor}")
def test_caches_do_not_grow(cell, monkeypatch):
    found = capacities(cell, monkeypatch)
    assert found
    for reserved, allocated, used in found:
        assert used <= reserved == allocated


def test_a_cache_that_grows_adds_little():
    """32,896 slots, and one more: not twice as many."""
    device = torch.device("cpu")
    spec = CacheSpec(num_layers=1, num_kv_heads=1, head_dim=2, dtype=torch.float32, device=device)
    memory = Contiguous(make=spec.empty, capacity=32_896)
    memory.tensor[:] = 1.0
    memory.reserve(32_897, 32_896)
    assert 32_897 <= memory.capacity <= 1.05 * 32_897
    assert (memory.tensor[:, :, :, :32_896] == 1.0).all()
