"""Static buffers: reuse of arenas, growth, families, slices, error messages."""

import gc
import weakref

import numpy as np
import pytest

from specdec.clocks.meter import Meter
from specdec.errors import UserError
from specdec.models.backends.graphs import COLUMN_COUNTS
from specdec.models.execution import Execution
from specdec.models.random import random_model
from specdec.models.runner import NO_ROWS, ROW_COUNTS, Eager, ModelRunner
from specdec.types import TreeRows
from tests.trees import grown

pytestmark = pytest.mark.slow

REPLAY = Execution(graphs="replay")


def _runner(model, execution=REPLAY, **kwargs):
    return ModelRunner(model=model, name="target", meter=Meter(), execution=execution, **kwargs)


def test_equals_a_plain_pass():
    """Padded rows, windows and soft caps; numbers of nodes at and between the captured counts."""
    options = {"sliding_window": 6}
    model = random_model("gemma2", dtype="float64", num_layers=2, options=options)
    plain, static = _runner(model, Execution()), _runner(model)
    for nodes in (1, 3, 8):
        found = []
        for runner in (plain, static):
            rows = grown(runner, runner.new_cache(8), prefix=9, nodes=nodes, seed=nodes)
            found.append(runner.forward([rows]).logits)
        assert (found[0] - found[1]).abs().max() < 1e-12
    assert static.backend.replays == 6


def test_an_arena_is_used_again_and_its_past_is_not_seen():
    """A later request reuses the arena, and the captured passes, of a closed one."""
    model = random_model("llama", dtype="float64", num_layers=2)
    plain, static = _runner(model, Execution()), _runner(model)
    first = static.new_cache(40)
    static.forward([grown(static, first, prefix=30, nodes=8, seed=1)])
    address, num = first.storage.data_ptr(), len(static.backend.launches)
    first.storage.fill_(1e3)
    del first
    gc.collect()
    again = static.new_cache(50)
    assert again.storage.data_ptr() == address
    found = static.forward([grown(static, again, prefix=30, nodes=8, seed=2)]).logits
    assert len(static.backend.launches) == num
    rows = grown(plain, plain.new_cache(8), prefix=30, nodes=8, seed=2)
    assert (found - plain.forward([rows]).logits).abs().max() < 1e-12


def test_a_cache_outgrows_its_arena():
    model = random_model("llama", dtype="float64", num_layers=2)
    plain, static = _runner(model, Execution()), _runner(model)
    cache = static.new_cache(8)
    small = cache.capacity
    found = static.forward([grown(static, cache, prefix=small + 30, nodes=5)]).logits
    assert cache.capacity > small
    rows = grown(plain, plain.new_cache(8), prefix=small + 30, nodes=5)
    assert (found - plain.forward([rows]).logits).abs().max() < 1e-12


def test_larger_passes_run_uncaptured():
    """With more rows than the largest count, or more entries than the widest mask."""
    model = random_model("llama", num_layers=1, max_positions=4096)
    static = _runner(model)
    many = grown(static, static.new_cache(8), prefix=9, nodes=ROW_COUNTS[-1] + 1)
    before = static.backend.replays
    static.forward([many], logits_rows=NO_ROWS)
    assert static.backend.replays == before
    wide = grown(static, static.new_cache(8), prefix=9, nodes=COLUMN_COUNTS[-1])
    static.forward([wide], logits_rows=NO_ROWS)
    one = {"node_ids": np.array([5000]), "tokens": np.array([4]), "parent_ids": np.array([-1])}
    last = wide.cache.rows(tree=TreeRows.within(prefix_len=9, **one))
    assert len(last) == 1
    assert not static.backend.serves([last])
    assert static.backend.serves([grown(static, static.new_cache(8), prefix=1, nodes=1)])


def test_a_runner_that_is_gone_leaves_no_memory():
    """Weights, arenas and graphs are freed at once, not by the next garbage collection."""
    gc.collect()
    gc.disable()
    try:
        runner = _runner(random_model("llama", num_layers=1))
        runner.forward([grown(runner, runner.new_cache(8), prefix=9, nodes=4)])
        backend = runner.backend
        left = [weakref.ref(thing) for thing in (runner, backend, backend.layers.model)]
        del backend
        del runner
        assert [found() for found in left] == [None] * 3
    finally:
        gc.enable()


def test_refusals_name_the_remedy():
    model = random_model("llama", num_layers=1)
    with pytest.raises(UserError, match=r"model.graphs=always is unknown; choose off"):
        _runner(model, Execution(graphs="always"))
    with pytest.raises(UserError, match=r"model.graphs=cuda needs a CUDA device.*replay"):
        _runner(model, Execution(graphs="cuda"))
    with pytest.raises(UserError, match=r"model.kernels=cutlass is unknown"):
        _runner(model, Execution(kernels="cutlass"))
    eager = _runner(model, Execution(graphs="auto")).backend  # there is no CUDA device
    assert type(eager) is Eager


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["dense", "triton"])
def test_cuda_graphs_equal_plain_passes(attention):
    """Captured and replayed on a device, against the same kernels without graphs."""
    model = random_model("llama", device="cuda", num_layers=2, scale=0.1)
    plain = _runner(model, Execution())
    graphs = _runner(model, Execution(graphs="cuda"), attention=attention)
    for nodes in (1, 3, 8, 3):
        found = []
        for runner in (plain, graphs):
            rows = grown(runner, runner.new_cache(64), prefix=9, nodes=nodes, seed=nodes)
            found.append(runner.forward([rows]).logits)
        assert (found[0] - found[1]).abs().max() < 1e-3  # float32 sums in another order
