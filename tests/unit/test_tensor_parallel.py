"""The shares of a model together equal the model, at any degree; padding is zero."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch.distributed import HashStore
from transformers import PreTrainedModel

from specdec.clocks.meter import Meter
from specdec.distributed.transport import RankCollective, gloo_group
from specdec.models.inspection import CERTIFIED
from specdec.models.loading import load_model, sharded
from specdec.models.random import random_model
from specdec.models.runner import ModelRunner
from specdec.tensor_parallel import collective
from specdec.tensor_parallel.collective import Collective
from specdec.tensor_parallel.cuts import Cut, HeadSplit, even
from specdec.types import TreeRows
from tests.shares import run_group

T = TypeVar("T")

TOLERANCE = 1e-6
"""Of logits: transformers' norms pass through float32, where another order of sums may round."""

PREFIX = np.array([3, 1, 4, 1, 5], np.int64)
TREE = TreeRows.within(  # a root, two children, a grandchild
    prefix_len=5,
    node_ids=np.arange(4),
    tokens=np.array([9, 2, 6, 5], np.int64),
    parent_ids=np.array([-1, 0, 0, 1], np.int64),
)


def model_of(family: str, **options: Any) -> PreTrainedModel:
    """Two layers with 4 query and 2 key/value heads; 61 tokens, 64 MLP columns."""
    return random_model(
        family, dtype="float64", num_layers=2, vocab_size=61, options=options or None
    )


def logits_of(model: PreTrainedModel, group: Collective | None = None) -> torch.Tensor:
    """Logits of a prefix, then of a tree on it, by a runner over the model or a share of it."""
    if group is None:
        runner = ModelRunner(model=model, name="target", meter=Meter())
    else:
        with group.paused():
            share = sharded(model, group)
            runner = ModelRunner(model=share, name="target", meter=Meter())
    cache = runner.new_cache(8)
    first = runner.forward([cache.rows(prefix_tokens=PREFIX)]).logits
    then = runner.forward([cache.rows(tree=TREE)]).logits
    assert first is not None
    assert then is not None
    return torch.cat([first, then])


def check_degrees(model: PreTrainedModel, *degrees: int) -> None:
    expected = logits_of(model)
    for degree in degrees:
        found = run_group(degree, lambda group: logits_of(model, group))
        for rank, logits in enumerate(found):
            assert logits.shape == expected.shape, "padded tokens must not be seen"
            error = (logits - expected).abs().max().item()
            assert error < TOLERANCE, f"rank {rank} of {degree}: off by {error:.1e}"


@pytest.mark.parametrize("family", sorted(CERTIFIED))
def test_families_at_a_degree_that_divides_nothing(family: str) -> None:
    check_degrees(model_of(family), 3)


@pytest.mark.parametrize("tied", [True, False])
def test_llama_at_degrees_up_to_more_than_heads(tied: bool) -> None:
    """2, 4: key/value heads divide, then are shared; 5: more ranks than query heads."""
    check_degrees(model_of("llama", tie_word_embeddings=tied), 2, 4, 5)


@pytest.mark.parametrize("heads", [(4, 4), (8, 1), (25, 5)])
def test_every_query_head_is_on_one_rank_with_its_key_value_head(heads: tuple[int, int]) -> None:
    num_heads, num_kv_heads = heads
    per_group = num_heads // num_kv_heads
    for size in range(1, 10):
        seen: list[int] = []
        for rank in range(size):
            split = HeadSplit.of(num_heads, num_kv_heads, rank=rank, size=size)
            assert len(split.query) == len(split.key_value)
            for query, key_value in zip(split.query, split.key_value, strict=True):
                held = list(range(query.start, query.stop))
                assert len(held) + query.pad == split.group_size
                assert all(head // per_group == key_value.start for head in held)
                assert not held or key_value.pad == 0
                seen += held
        assert seen == list(range(num_heads)), f"{size} ranks"


@pytest.mark.parametrize(
    ("heads", "size", "query", "key_value"),
    [
        ((64, 8), 6, 12, 3),  # 16 query heads, and two ranks without any, if groups stay whole
        ((64, 8), 4, 16, 2),
        ((40, 8), 3, 15, 3),
    ],
)
def test_ranks_share_heads_almost_evenly(heads, size, query, key_value):
    """At degrees that do not divide the key/value heads; those that do keep groups whole."""
    split = HeadSplit.of(*heads, rank=0, size=size)
    assert (len(split.query) * split.group_size, len(split.key_value)) == (query, key_value)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_share_reads_what_a_share_of_the_whole_holds(family: str, tmp_path: Path) -> None:
    """From safetensors, also for a stage: equal parameters, all others on the meta device."""
    model = model_of(family, tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    for rank in range(3):
        group = Collective(rank=rank, size=3)
        expected = dict(sharded(model, group).named_parameters(remove_duplicate=False))
        whole = load_model(tmp_path, layers=(0, 2), dtype="float64", group=group)
        found = dict(whole.named_parameters(remove_duplicate=False))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        last = dict(
            load_model(tmp_path, layers=(1, 2), dtype="float64", group=group).named_parameters()
        )
        for name, parameter in last.items():
            assert parameter.is_meta or torch.equal(parameter, expected[name])
        assert any(p.is_meta for p in last.values())


def test_a_cut_reads_no_more_than_its_pieces() -> None:
    class Slice:
        def __init__(self) -> None:
            self.read: list[Any] = []

        def get_shape(self) -> list[int]:
            return [5, 2]

        def __getitem__(self, at: Any) -> torch.Tensor:
            self.read.append(at)
            return torch.ones(5, 2)[at]

    source = Slice()
    share = Cut(0, (even(5, rank=1, size=2),)).of(source, torch.float32)
    assert source.read == [slice(3, 5)]
    assert share.tolist() == [[1, 1], [1, 1], [0, 0]]


def test_input_embeddings_are_replicated_whatever_a_plan_says() -> None:
    """transformers 5.24 shards those of GPT-NeoX."""
    model = model_of("llama")
    plan = dict(model.config.base_model_tp_plan)
    expected = {
        n: p.shape for n, p in sharded(model, Collective(rank=1, size=2)).named_parameters()
    }
    model.config.base_model_tp_plan = {"embed_tokens": "embedding_rowwise", **plan}
    share = sharded(model, Collective(rank=1, size=2))
    assert {name: p.shape for name, p in share.named_parameters()} == expected
    assert torch.equal(share.get_input_embeddings().weight, model.get_input_embeddings().weight)


def over_gloo(size: int, work: Callable[[RankCollective], T]) -> list[T]:
    """Runs ``work`` on ranks that are threads of this process, connected by gloo."""
    store = HashStore()

    def one(rank: int) -> T:
        group = gloo_group(store, rank, size, loopback=True)
        return work(RankCollective(group, rank=rank, peers=range(size)))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


@pytest.mark.parametrize(
    ("size", "dtype"),
    [(3, torch.float64), (5, torch.float32), (5, torch.bfloat16), (3, torch.float16)],
)
def test_sums_over_gloo_are_sent_in_their_own_type(size, dtype, monkeypatch):
    """Bits of ((a + b) + c), 16-bit types in float32, whole or row by row; bytes of the whole."""
    rows, columns = 40, 7
    parts = torch.randn(size, rows, columns, generator=torch.Generator().manual_seed(0)).to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    expected = sum(parts[1:].to(wide), start=parts[0].to(wide)).to(dtype)
    itemsize = parts.element_size()
    padded = -(-rows * columns // size)

    def sums(group):
        own = parts[group.rank]
        total, num_bytes = group.add(own), group.num_bytes
        return total, num_bytes, torch.stack([group.add(row) for row in own])

    for limit, sent in (
        (collective.ONE_EXCHANGE_BYTES, (size - 1) * rows * columns * itemsize),
        (0, 2 * (size - 1) * padded * itemsize),
    ):
        monkeypatch.setattr(collective, "ONE_EXCHANGE_BYTES", limit)
        for total, num_bytes, by_row in over_gloo(size, sums):
            assert total.dtype == dtype
            assert torch.equal(total, expected)
            assert torch.equal(by_row, expected)
            assert num_bytes == sent
    whole = over_gloo(size, lambda group: group.gather(parts[group.rank]))
    assert all(torch.equal(found, torch.cat(list(parts), -1)) for found in whole)
