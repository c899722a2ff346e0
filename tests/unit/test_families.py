"""Tree attention in every family equals transformers' own forward over each node's path.

The reference is transformers' model with transformers' masks and plain attention in float64 (its
"eager" computes the softmax in float32, its "sdpa" does not support soft caps). So a bound of 1e-12
is fair: the remaining differences come from the order of sums.
"""

import numpy as np
import pytest
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
)
from transformers.masking_utils import eager_mask

from specdec.errors import UserError
from specdec.models.inspection import CERTIFIED
from specdec.models.random import random_model
from specdec.models.runner import NO_ROWS, check_family
from specdec.types import NO_NODE, TreeRows
from tests.shapes import runner_of, stages_of

TOLERANCE = 1e-12
PREFIX, NODES = 12, 12
WINDOW = 5
_QWEN_WINDOW = {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1}
WINDOWED = {
    **{f: {"sliding_window": WINDOW} for f in ("mistral", "gemma2", "phi3", "starcoder2")},
    # Two kinds of layers with two kinds of rotary embeddings: slices must keep them apart.
    "gemma3_text": {
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "qwen2": _QWEN_WINDOW,
    "qwen3": _QWEN_WINDOW,
}
CASES = [(family, {}) for family in sorted(CERTIFIED)] + sorted(WINDOWED.items())
LAYERS = 3
CUTS = [(0, 3), (0, 1, 3), (0, 1, 2, 3)]


def _attention64(module, query, key, value, attention_mask, scaling=None, softcap=None, **unused):
    repeats = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(repeats, 1) for t in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if attention_mask is not None:
        scores = scores + attention_mask
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register("test_attention64", _attention64)
AttentionMaskInterface.register("test_attention64", eager_mask)


def _reference(model, prefix, tokens, parents):
    """Logits[N, V] of a fresh forward over each node's path."""
    model.set_attn_implementation("test_attention64")
    rows = []
    for node in range(NODES):
        path = [node]
        while parents[path[-1]] != NO_NODE:
            path.append(parents[path[-1]])
        sequence = np.concatenate([prefix, tokens[path[::-1]]])
        rows.append(model(torch.from_numpy(sequence)[None]).logits[0, -1])
    return torch.stack(rows)


@pytest.mark.parametrize(("family", "options"), CASES, ids=lambda value: str(value))
def test_nodes_equal_fresh_forward(family, options):
    """Whole models and slices in 2 and 3 stages, the tree in ragged batches."""
    rng = np.random.default_rng(7)
    model = random_model(family, dtype="float64", num_layers=LAYERS, options=options)
    prefix, tokens = rng.integers(3, 61, PREFIX), rng.integers(3, 61, NODES)
    parents = np.array([NO_NODE] + [int(rng.integers(0, i)) for i in range(1, NODES)])
    expected = _reference(model, prefix, tokens, parents)
    model.train()  # a runner computes without dropout, as the reference above
    ids = 100 + np.arange(NODES)
    parent_ids = np.where(parents == NO_NODE, NO_NODE, parents + 100)
    tree = TreeRows.within(prefix_len=PREFIX, node_ids=ids, tokens=tokens, parent_ids=parent_ids)
    for cuts in CUTS:
        stages = stages_of(model, cuts)
        caches = [stage.new_cache(4) for stage in stages]
        logits = []
        for nodes in (slice(0, 0), slice(0, 1), slice(1, 5), slice(5, NODES)):
            hidden = None
            for stage, cache in zip(stages, caches, strict=True):
                rows = cache.rows(
                    prefix_tokens=prefix[: PREFIX if nodes.stop == 0 else 0],
                    tree=tree.take(np.arange(NODES)[nodes]),
                )
                wanted = None if nodes.stop else NO_ROWS
                output = stage.forward([rows], hidden=hidden, logits_rows=wanted)
                hidden = output.hidden
            if output.logits is not None:
                logits.append(output.logits)
        error = (torch.cat(logits) - expected).abs().max().item()
        assert error < TOLERANCE, f"{cuts}: {error}"


@pytest.mark.parametrize("family", sorted(WINDOWED))
def test_window_matters(family):
    """Control of the test above: without its window, the model's logits differ."""
    rng = np.random.default_rng(7)
    sequence = torch.from_numpy(rng.integers(3, 61, 20))[None]
    logits = [
        random_model(family, dtype="float64", num_layers=LAYERS, options=options)(sequence).logits[
            0, -1
        ]
        for options in (WINDOWED[family], {**WINDOWED[family], "sliding_window": 64})
    ]
    assert (logits[0] - logits[1]).abs().max() > 1e-3


def test_given_model_is_unchanged():
    """A runner works on a copy: the given model's output and config do not change."""
    model = random_model("llama")
    tokens = torch.arange(3, 20)[None]
    before, config = model(tokens).logits, model.config.to_dict()
    modules = [type(module) for module in model.modules()]
    runner = runner_of(model, first_layer=1, last_layer=3)
    assert torch.equal(model(tokens).logits, before)
    assert model.config.to_dict() == config
    assert [type(module) for module in model.modules()] == modules
    owned = {p.data_ptr() for p in model.parameters()}
    assert all(p.data_ptr() in owned for p in runner.backend.layers.model.parameters())


def _small(family, **options):
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model(family, **sizes, pad_token_id=0, **options)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("bert", "differ by"),  # sees both sides
        ("diffllama", "differ by"),  # subtracts two attentions
        ("falcon", "needs another cache"),  # attention of its own
        ("llama4_text", "chunked_attention"),
        ("big_bird", "do not all attend"),  # blocks of its own
        ("stablelm", "passes no arguments"),
    ],
)
def test_unsuited_families_are_refused(family, message):
    """Families that are not certified are compared with transformers' logits before use."""
    with pytest.raises(UserError, match=f"'{family}'.*{message}"):
        check_family(_small(family))


def test_suited_family_is_accepted():
    """OLMo is not certified, but passes the comparison."""
    check_family(_small("olmo", intermediate_size=64, num_key_value_heads=2))


def test_attention_with_unknown_features_is_refused():
    """Attention sinks (gpt_oss) must not be ignored silently."""
    sizes = {"intermediate_size": 32, "num_key_value_heads": 2, "head_dim": 8}
    model = _small("gpt_oss", **sizes, num_local_experts=2, num_experts_per_tok=1)
    with pytest.raises(UserError, match="s_aux"):
        runner_of(model)
