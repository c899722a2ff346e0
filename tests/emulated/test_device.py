"""The emulated device rejects what CUDA rejects; otherwise tests on it could not fail."""

from types import SimpleNamespace

import pytest
import torch

from specdec.distributed.transport import CPU, RankCollective, wire_device
from specdec.models.backends.graphs import capture
from specdec.models.runner import RunnerOutput
from tests.emulated.device import HERE, DeviceTensor, emulated


def test_devices_do_not_mix():
    with emulated() as device:
        there = torch.arange(3.0, device="cuda")
        assert there.device == HERE
        for mixed in (lambda: there + torch.ones(3), lambda: torch.cat([there, torch.ones(1)])):
            with pytest.raises(RuntimeError, match="one device, found cuda:0 and cpu"):
                mixed()
        with pytest.raises(RuntimeError, match="numpy"):
            there.numpy()
        assert (there + torch.tensor(2.0)).tolist() == [2.0, 3.0, 4.0]  # a scalar may
        before = len(device.to_device)
        assert torch.where(there > 1, there, torch.tensor(0.0)).tolist() == [0.0, 0.0, 2.0]
        assert len(device.to_device) == before + 1  # but not for nothing


def test_memory_that_was_not_written_is_seen():
    """Also of tensors like others and of those that grow; outside, torch's settings are kept."""
    with emulated():
        fresh = torch.empty(3, device="cuda")
        assert torch.empty_like(fresh).isnan().all().cpu()
        assert fresh.new_empty(2).resize_(5).isnan().all().cpu()
        largest = torch.iinfo(torch.int64).max
        assert torch.empty(2, dtype=torch.int64, device="cuda").tolist() == [largest, largest]
    assert not torch.are_deterministic_algorithms_enabled()


def _computed(hidden: torch.Tensor) -> RunnerOutput:
    return RunnerOutput(hidden=hidden)


def test_a_replay_computes_anew_where_it_was_captured():
    """From and to the same memory; it computes nothing before the first replay."""
    with emulated() as device, torch.inference_mode():
        given = torch.tensor([1.0, 2.0], device="cuda")
        calls = []

        def launch() -> RunnerOutput:
            calls.append(None)
            made = given * 2
            made += 1
            return _computed(made.view(2, 1))

        replay = capture(launch, None)
        assert device.graphs[0].replays == 0
        first = replay().hidden
        assert first.flatten().tolist() == [3.0, 5.0]
        given.fill_(10.0)
        assert replay().hidden is first
        assert first.flatten().tolist() == [21.0, 21.0]
        assert len(calls) == 3  # two to warm up, one to capture


def test_graphs_of_a_pool_share_memory():
    """Control for the tests of outputs that outlive a replay."""
    with emulated(), torch.inference_mode():
        given = torch.ones(2, device="cuda")
        one, other = (capture(lambda f=f: _computed(given * f), "pool") for f in (2, 3))
        kept = one().hidden
        assert kept.tolist() == [2.0, 2.0]
        other()
        assert kept.isnan().all().cpu()


class _HostGroup:
    """Replaces gloo: two ranks with equal tensors, which must be on the host."""

    def _allgather_base(self, received, own):
        assert not isinstance(own, DeviceTensor)
        received.copy_(own.repeat(2))
        return SimpleNamespace(wait=lambda patience: None)


class _DeviceGroup:
    """Replaces NCCL, whose work handles must not get a time limit."""

    def _allgather_base(self, received, own):
        assert isinstance(own, DeviceTensor)
        received.copy_(own.repeat(2))
        return SimpleNamespace(wait=lambda: None)


def test_ranks_that_share_a_gpu_meet_on_the_host():
    """NCCL rejects two ranks on one GPU: gloo gets copies, and results are copied back."""
    with emulated():
        shared = RankCollective(_HostGroup(), rank=0, peers=(1, 2), wire=CPU)
        found = shared.add(torch.ones(2, 2, device="cuda"))
        assert (found.device, found.tolist()) == (HERE, [[2.0, 2.0], [2.0, 2.0]])
        found = shared.gather(torch.ones(2, 1, device="cuda"))
        assert (found.device, found.tolist()) == (HERE, [[1.0, 1.0], [1.0, 1.0]])
        apart = RankCollective(_DeviceGroup(), rank=0, peers=(1, 2), wire=HERE)
        assert apart.add(torch.ones(2, device="cuda")).device == HERE


class _Store(dict):
    """Replaces the ranks' store."""

    def set(self, key, value):
        self[key] = value.encode()

    def check(self, keys):
        return all(key in self for key in keys)

    def get(self, key):
        return self[key]


def test_ranks_agree_where_to_meet(monkeypatch):
    """Also the rank whose GPU nobody shares: it would wait for the others in another group."""
    with emulated():
        for mine, gpus, wire in (
            ("a", "bb", CPU),
            ("a", "ab", CPU),
            ("a", ("b", "cpu"), CPU),
            ("a", "bc", HERE),
        ):
            monkeypatch.setattr(
                torch.cuda, "get_device_properties", lambda _, own=mine: SimpleNamespace(uuid=own)
            )
            store = _Store({f"gpu/{i}": gpu.encode() for i, gpu in enumerate(gpus, 1)})
            assert wire_device(store, 0, range(3), HERE) == wire
            assert store["gpu/0"] == mine.encode()
        assert wire_device(_Store(), 1, (1, 3), CPU) == CPU  # nobody is asked
