"""Triton kernels against their references: interpreted on the CPU, compiled on a GPU."""

from types import SimpleNamespace

import pytest
import torch

from tests.kernels import reference

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
swiglu = pytest.importorskip("specdec.kernels.swiglu").swiglu
attention_module = pytest.importorskip("specdec.attention.triton_kernel")
TreeAttention, splits_of = attention_module.TreeAttention, attention_module._splits
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# A hundred roundings of 6e-8 on values of about one.
CLOSE = 1e-5


def _attention_problem(*, heads, groups, dim, rows, first, end, capacity, columns, seed=0):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(1, heads, rows, dim, generator=generator)
    key, value = torch.randn(2, 1, groups, capacity, dim, generator=generator)
    key[:, :, end:] = value[:, :, end:] = torch.nan  # must not be looked at
    visible = torch.rand(rows, columns, generator=generator) < 0.4
    visible[:, end - first :] = True  # columns beyond the end must not count either
    return query.to(DEVICE), key.to(DEVICE), value.to(DEVICE), visible.to(DEVICE)


SIZES = [
    # heads, groups, dim, rows, first, end, capacity, columns
    (4, 2, 8, 5, 14, 23, 40, 17),  # a tree of 9, of which 5 are asked for
    (6, 2, 24, 7, 130, 151, 200, 32),  # several blocks of keys, sizes that are no powers of two
    (3, 1, 16, 1, 0, 1, 64, 1),  # the very first token
    (2, 2, 80, 3, 64, 64 + 70, 160, 96),  # the tree spans blocks, no groups
    (4, 1, 64, 33, 65, 140, 150, 75),  # more rows than one block takes
]


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("size", SIZES)
def test_tree_attention(size, splits):
    """Every split of the context, odd sizes, non-square masks: the reference's softmax."""
    names = ("heads", "groups", "dim", "rows", "first", "end", "capacity", "columns")
    sizes = dict(zip(names, size, strict=True))
    query, key, value, visible = _attention_problem(**sizes)
    first, end = sizes["first"], sizes["end"]
    lengths = torch.tensor([first, end], device=DEVICE)
    kernel = TreeAttention(splits=splits)
    expected = reference.tree_attention(query, key, value, first=first, end=end, visible=visible)
    bits = visible.to(torch.uint8)
    for _ in range(2):  # the counters are back at 0 after a launch
        found = kernel(query, key, value, lengths=lengths, visible=bits)
        assert (found - expected).abs().max() < CLOSE


def test_tree_attention_reads_strides_and_scaling():
    """Queries as transformers lays them out, a cache inside a larger tensor, another scaling."""
    query, key, value, visible = _attention_problem(
        heads=4, groups=2, dim=16, rows=6, first=20, end=31, capacity=50, columns=11
    )
    storage = torch.stack([key[0], value[0]])  # [2, G, C, D]
    stored = storage[:, :, 3:48].unsqueeze(1)
    query = query.transpose(1, 2).contiguous().transpose(1, 2)
    found = TreeAttention()(
        query,
        stored[0],
        stored[1],
        lengths=torch.tensor([17, 28], device=DEVICE),
        visible=visible.to(torch.uint8),
        scaling=0.7,
    )
    expected = reference.tree_attention(
        query, stored[0], stored[1], first=17, end=28, visible=visible, scaling=0.7
    )
    assert (found - expected).abs().max() < CLOSE


def test_rows_without_a_prefix_that_see_nothing_are_zero():
    """All splits of such a row are empty, and some of other rows' splits: none may yield NaN."""
    query, key, value, visible = _attention_problem(
        heads=4, groups=2, dim=16, rows=6, first=0, end=131, capacity=400, columns=140
    )
    visible[1] = visible[4] = False
    visible[2, :130] = False
    lengths = torch.tensor([0, 131], device=DEVICE)
    for splits in (1, 2, 16):  # of the last most lie beyond the end
        kernel = TreeAttention(splits=splits)
        found = kernel(query, key, value, lengths=lengths, visible=visible.to(torch.uint8))
        expected = reference.tree_attention(query, key, value, first=0, end=131, visible=visible)
        assert (found - expected).abs().max() < CLOSE
        assert (found[:, :, [1, 4]] == 0).all()


@pytest.mark.parametrize("dim", [96, 200, 256])
def test_wide_heads_take_smaller_blocks(dim):
    """Fewer keys and rows at a time, so that a block fits a multiprocessor's shared memory."""
    query, key, value, visible = _attention_problem(
        heads=8, groups=2, dim=dim, rows=11, first=40, end=62, capacity=70, columns=24
    )
    lengths = torch.tensor([40, 62], device=DEVICE)
    found = TreeAttention()(query, key, value, lengths=lengths, visible=visible.to(torch.uint8))
    expected = reference.tree_attention(query, key, value, first=40, end=62, visible=visible)
    assert (found - expected).abs().max() < CLOSE


def test_a_growing_context_needs_few_kinds_of_launches(monkeypatch):
    """Each number of splits needs a compilation and scratch memory."""
    device = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    found = [splits_of(torch.device("cuda"), 8, blocks) for blocks in range(1, 260)]
    assert sorted(set(found)) == [1, 2, 4, 8, 16, 32]  # 32 x 8 heads on 132 processors
    assert all(splits <= blocks for blocks, splits in enumerate(found, 1))
    assert splits_of(torch.device("cuda"), 1000, 260) == 1


@pytest.mark.parametrize("size", [(1, 40, 70), (5, 96, 33), (67, 100, 45)])
def test_swiglu(size):
    """Tiles that the sizes do not fill, more rows than a tile."""
    rows, num_in, num_out = size
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(rows, num_in, generator=generator).to(DEVICE)
    gate, up = (torch.randn(2, num_out, num_in, generator=generator) * num_in**-0.5).to(DEVICE)
    found = swiglu(hidden, gate, up)
    assert (found - reference.swiglu(hidden, gate, up)).abs().max() < CLOSE
    assert (found - reference.swiglu(hidden, up, gate)).abs().max() > 0.05  # not symmetric
