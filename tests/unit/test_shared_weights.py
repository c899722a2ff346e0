"""Strategies of one process share the weights of layers that they have in common."""

import gc

import pytest
import torch

from specdec.clocks.meter import Meter
from specdec.models.random import random_model
from specdec.pairs import PretrainedPair
from specdec.tensor_parallel.collective import Collective
from tests.pretrained import pretrained

LAYERS = 4
ROWS = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("shared")
    random_model("llama", num_layers=LAYERS).save_pretrained(path)
    return path


def memory(models) -> int:
    """Bytes of the parameters of all models, shared ones once."""
    storages = {
        parameter.untyped_storage().data_ptr(): parameter.untyped_storage().nbytes()
        for model in models
        for parameter in model.parameters()
        if not parameter.is_meta
    }
    return sum(storages.values())


def parts_of(pair: PretrainedPair, kind: str):
    """What one row of a comparison loads on a rank."""
    if kind == "stage":
        return pair.stage(1, 3, Meter()).runner.backend.layers.model
    group = Collective(rank=1, size=2)  # each row has a group of its own
    if kind == "share":
        return pair.share("target", group, (0, LAYERS))
    return pair.share("draft", group)


@pytest.mark.parametrize("kind", ["stage", "share", "draft"])
def test_five_rows_take_the_memory_of_one(folder, kind):
    pair = pretrained(folder, draft=str(folder)).without_target()
    rows = [parts_of(pair, kind) for _ in range(ROWS)]
    assert memory(rows) <= 1.1 * memory(rows[:1])
    alone = [parts_of(pretrained(folder, draft=str(folder)), kind) for _ in range(2)]
    assert memory(alone) == 2 * memory(alone[:1])  # control: nothing else shares


def test_overlapping_stages_share_their_common_layers(folder):
    """Of strategies with different numbers of stages; shares of other ranks are different."""
    pair = pretrained(folder).without_target()
    wide, narrow = (pair.part(first, LAYERS) for first in (1, 2))
    assert memory([wide, narrow]) == memory([wide])
    assert torch.equal(wide.lm_head.weight, narrow.lm_head.weight)
    shares = [pair.share("target", Collective(rank=rank, size=2), (0, LAYERS)) for rank in range(2)]
    first, second = (share.model.layers[0].mlp.up_proj.weight for share in shares)
    assert not torch.equal(first, second)


def test_weights_are_freed_with_their_last_user(folder):
    pair = pretrained(folder).without_target()
    stages = [pair.stage(1, 3, Meter()) for _ in range(2)]
    assert len(pair._weights)
    stages.pop()
    gc.collect()
    assert len(pair._weights)
    stages.pop()
    gc.collect()
    assert not len(pair._weights)
