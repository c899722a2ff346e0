"""One GPU per process, or a refusal that names layouts that fit."""

import pytest
import torch

from specdec.distributed.plan import check_gpus, own_gpu
from specdec.errors import UserError
from specdec.executors.layout import StageLayout


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)


@pytest.mark.parametrize(
    ("layout", "num_gpus", "fits"),
    [
        ({"stages": 8}, 8, ["executor.stages=7"]),
        ({"stages": 1, "degree": 8}, 8, ["executor.target_degree=7"]),
        ({"stages": 4, "degree": 2}, 8, ["executor.stages=3", "executor.target_degree=1"]),
        ({"stages": 1, "degree": 6, "draft_degree": 4}, 8, ["target_degree=4", "draft_degree"]),
        ({"stages": 3}, 1, ["model.device=cpu"]),
    ],
)
def test_layouts_that_fit_are_named(layout, num_gpus, fits):
    """The controller and the draft's ranks have GPUs too."""
    asked = StageLayout(**layout)
    others = asked.draft_degree
    with pytest.raises(UserError) as refusal:
        check_gpus(asked, asked.num_devices + others, num_gpus)
    for fit in fits:
        assert fit in str(refusal.value)
    assert "=0" not in str(refusal.value)
    check_gpus(asked, asked.num_devices + others, asked.num_devices + others)


def test_target_and_draft_in_turns_need_the_devices_of_one(monkeypatch):
    """``swiftspec_base``: nine processes, of which the first and the last share a GPU."""
    shared = StageLayout(stages=1, degree=8, draft_degree=8, shared=True)
    check_gpus(shared, 9, 8)
    with pytest.raises(UserError, match=r"needs 8 processes.*executor.target_degree=7"):
        check_gpus(shared, 9, 7)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    found = [own_gpu(rank, shared_with_draft=True).index for rank in range(9)]
    assert found == [0, 1, 2, 3, 4, 5, 6, 7, 0]


def test_each_rank_has_its_own_gpu(monkeypatch):
    """Rank 8 of 9 on eight GPUs would share that of rank 0's draft."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert [own_gpu(rank).index for rank in (1, 7)] == [1, 7]
    with pytest.raises(UserError, match="rank 8"):
        own_gpu(8)
    monkeypatch.setenv("LOCAL_RANK", "1")  # the second process of the second machine
    assert own_gpu(9).index == 1
    check_gpus(StageLayout(stages=16), 17, 8)  # each machine checks its own processes
