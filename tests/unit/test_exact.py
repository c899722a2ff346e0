"""``model.exact=true``: the bits of a row in every pass, the proofs, and what is refused."""

import numpy as np
import pytest
import torch

from specdec.attention.exact import BLOCK, Context, exact_attention
from specdec.attention.tree_attention import BlockPool, ScoreOptions, capped_attention
from specdec.models.backends.exact import Operator, Setting, proved_counts
from specdec.models.execution import PLAIN, Execution
from specdec.models.inspection import CERTIFIED
from specdec.models.loading import sharded
from specdec.models.random import random_model
from specdec.models.runner import ModelRunner
from specdec.types import TreeRows
from tests.shapes import runner_of
from tests.shares import run_group

pytestmark = pytest.mark.slow

EXACT = Execution(exact=True)
LENGTH = 2 * BLOCK + 40  # tokens of the sequence whose logits are compared
NUM_NODES = 24  # of them, the last ones as nodes of a tree
OPTIONS = {
    "mistral": {"sliding_window": 50},
    "gemma2": {"sliding_window": 50, "attn_logit_softcapping": 3.0},
    "gemma3_text": {"sliding_window": 50},
}


def _runner(family="llama", dtype="bfloat16", *, execution=EXACT, **layers) -> ModelRunner:
    sizes = {"hidden_size": 64, "vocab_size": 61, "num_layers": 2}
    options = OPTIONS.get(family)
    model = random_model(family, dtype=dtype, scale=0.15, options=options, **sizes)
    return runner_of(model, execution=execution, **layers)


def _tokens(length: int = LENGTH, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 61, length)


def _plain(runner: ModelRunner, tokens: np.ndarray) -> torch.Tensor:
    """Logits of a prompt's prefill, then of passes over one row each, as in plain decoding."""
    cache, split = runner.new_cache(len(tokens)), max(0, len(tokens) - NUM_NODES - 8)
    first = [] if not split else [runner.forward([cache.rows(prefix_tokens=tokens[:split])]).logits]
    rows = [
        runner.forward([cache.rows(prefix_tokens=tokens[i : i + 1])]).logits
        for i in range(split, len(tokens))
    ]
    return torch.cat([*first, *rows])


def _chunks(runner, tokens, size, cache=None) -> torch.Tensor:
    cache = cache or runner.new_cache(len(tokens))
    parts = [tokens[i : i + size] for i in range(0, len(tokens), size)]
    return torch.cat([runner.forward([cache.rows(prefix_tokens=p)]).logits for p in parts])


def _tree(runner, tokens, cache=None) -> torch.Tensor:
    """The last tokens as a path of a tree with siblings before, between and after its nodes."""
    cache = cache or runner.new_cache(8)
    split = len(tokens) - NUM_NODES
    first = runner.forward([cache.rows(prefix_tokens=tokens[:split])]).logits
    ids, parents, values, path = [], [], [], []
    last = -1
    for depth in range(NUM_NODES):
        for wrong in range(depth % 3):  # siblings that the path does not see
            ids.append(1000 * (wrong + 1) + depth)
            parents.append(last)
            values.append((tokens[split + depth] + 1 + wrong) % 61)
        path.append(len(ids))
        ids.append(depth)
        parents.append(last)
        values.append(tokens[split + depth])
        last = depth
    columns = {"node_ids": ids, "tokens": values, "parent_ids": parents}
    arrays = {name: np.array(column) for name, column in columns.items()}
    rows = cache.rows(tree=TreeRows.within(prefix_len=split, **arrays))
    return torch.cat([first, runner.forward([rows]).logits[path]])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_row_has_the_same_bits_in_every_pass(dtype):
    """One row, chunks, a prompt of more than 64 rows, a tree with siblings, a paged cache."""
    runner, tokens = _runner(dtype=dtype), _tokens()
    expected = _plain(runner, tokens)
    pool = BlockPool(spec=runner.spec, num_blocks=40, block_tokens=7)
    got = {
        "chunks of 7": _chunks(runner, tokens, 7),
        "one prompt": _chunks(runner, tokens, len(tokens)),
        "tree": _tree(runner, tokens),
        "paged": _tree(runner, tokens, runner.new_cache(8, pool)),
    }
    for name, logits in got.items():
        assert torch.equal(logits, expected), name


@pytest.mark.parametrize("family", sorted(CERTIFIED))
def test_families(family):
    """Windows shorter than the context, soft caps, learned positions, one key/value head."""
    runner, tokens = _runner(family), _tokens()
    expected = _plain(runner, tokens)
    assert torch.equal(_tree(runner, tokens), expected)
    assert torch.equal(_chunks(runner, tokens, 50), expected)


def test_requests_that_share_a_pass_do_not_matter():
    """Six requests of other lengths, one with a prefill chunk and a root in the same pass."""
    runner = _runner()
    prompts = [_tokens(30 + 9 * i, seed=i) for i in range(6)]
    expected = [_plain(runner, prompt) for prompt in prompts]
    caches = [runner.new_cache(8) for _ in prompts]
    packed = []
    for prompt, cache in zip(prompts, caches, strict=True):
        root = {"node_ids": np.array([0]), "parent_ids": np.array([-1]), "tokens": prompt[-1:]}
        tree = TreeRows.within(prefix_len=len(prompt) - 1, **root)
        packed.append(cache.rows(prefix_tokens=prompt[:-1], tree=tree))
    assert sum(map(len, packed)) > 2 * 64
    logits = runner.forward(packed).logits.split([len(p) for p in prompts])
    for ours, theirs in zip(logits, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_without_it_the_bits_differ():
    """Control: the passes above differ where nothing is padded or ordered."""
    runner, tokens = _runner(execution=PLAIN), _tokens()
    expected = _plain(runner, tokens)
    assert not torch.equal(_tree(runner, tokens), expected)
    assert not torch.equal(_chunks(runner, tokens, 7), expected)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 100])
def test_exact_attention_is_attention(softcap, window):
    """Against one softmax in float64, to rounding."""
    generator = torch.Generator().manual_seed(1)
    length, num_rows = 2 * BLOCK + 9, 5
    query = torch.randn(6, num_rows, 8, generator=generator, dtype=torch.float64)
    key, value = torch.randn(2, 3, length, 8, generator=generator, dtype=torch.float64)
    positions = torch.arange(length - num_rows, length)
    options = ScoreOptions(0.3, window, softcap)
    ours = exact_attention(query, key, value, Context(positions, 3, length), options)
    keys = torch.arange(length)
    hidden = keys > positions[:, None]
    if window is not None:
        hidden |= keys <= positions[:, None] - window
    mask = torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, -1e300)
    theirs = capped_attention(query[None], key[None], value[None], mask, 0.3, softcap)
    assert (ours.transpose(0, 1) - theirs[0]).abs().max() < 1e-13


# Proofs.

SETTING = Setting(torch.float32, torch.device("cpu"), 1)


def test_numbers_of_rows_that_differ_are_not_used():
    def by_number(start, stop):
        rows = torch.arange(start + 1.0, stop + 1.0)[:, None]
        return [rows * (1.0 if len(rows) >= 8 else 1.0 + 2**-20)]

    operator = Operator("planted", "by_number", 64, (by_number,))
    assert proved_counts([operator], SETTING) == (8, 16, 32, 64)


def test_unequal_numbers_of_a_group_are_intersected():
    """Ranks that have proved other numbers use the common ones, and sum in their order."""
    model = random_model("llama", dtype="bfloat16", num_layers=1, vocab_size=61)

    def work(group):
        with group.paused():
            share = sharded(model, group)
            runner = runner_of(share, execution=EXACT, group=group)
        if group.rank:
            runner.backend.counts = runner.backend.counts[1:]
        logits = _chunks(runner, _tokens(9), 9), _plain(runner, _tokens(9))
        return runner.backend.counts, *logits

    (counts, together, alone), (others, *_), _ = run_group(3, work)
    assert counts == others
    assert torch.equal(together, alone)
