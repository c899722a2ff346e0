"""Passes in ONNX Runtime equal eager ones up to rounding, over trees, slices and every storage.

Both compute in float32; a wrong mask, position or weight changes logits by more than 0.01 (see the
planted faults), rounding by less than 1e-4.
"""

from itertools import pairwise

import numpy as np
import pytest

from specdec.attention.tree_attention import BlockPool, host_mask
from specdec.clocks.meter import Meter
from specdec.errors import UserError
from specdec.models.execution import Execution
from specdec.models.onnx import graph as onnx_graph
from specdec.models.onnx import session as onnx_session
from specdec.models.onnx import support
from specdec.models.random import random_model
from specdec.pairs.random import build_random
from specdec.tensor_parallel.collective import Collective
from specdec.types import HiddenName, TreeRows
from tests.shapes import runner_of
from tests.trees import random_tree

pytest.importorskip("onnxruntime", reason="pip install specdec-lab[onnx]")

TOLERANCE = 1e-4
LAYERS, PREFIX, NODES = 4, 12, 10
SIZES = {"dtype": "float32", "num_layers": LAYERS, "hidden_size": 64}
_SCALED = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0}
_SCALED |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
PAIR = {"dtype": "float32", "hidden_size": 64}
CASES = {
    "llama": ("llama", {}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, untied, scaled rope, another eps": (
        "llama",
        {"tie_word_embeddings": False, "rope_parameters": _SCALED, "rms_norm_eps": 1e-2},
    ),
    "mistral, window of 5": ("mistral", {"sliding_window": 5}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3, windows in some layers": (
        "qwen3",
        {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 2},
    ),
}


def _runners(model, cuts, backend, capture=()):
    return [
        runner_of(
            model,
            first_layer=first,
            last_layer=last,
            capture=[name for name in capture if first <= name.layer < last],
            execution=Execution(backend=backend),
        )
        for first, last in pairwise(cuts)
    ]


def _tree(seed):
    return random_tree(np.random.default_rng(seed), PREFIX + seed, NODES)


def _decode(runners, make_cache, num_requests=2):
    """Outputs of prompts of 12 and 13 tokens and of two trees in ragged, shared passes."""
    caches = [[make_cache(runner) for _ in range(num_requests)] for runner in runners]
    trees = [_tree(seed) for seed in range(num_requests)]
    outputs = []
    for nodes in (slice(0, 0), slice(0, 1), slice(1, 4), slice(4, NODES)):
        hidden = None
        for runner, own in zip(runners, caches, strict=True):
            rows = []
            for r, (cache, tree) in enumerate(zip(own, trees, strict=True)):
                cut = slice(nodes.start, nodes.stop - r if nodes.stop == 4 else nodes.stop)
                cut = slice(cut.start - r if nodes.start == 4 else cut.start, cut.stop)
                prefix = np.random.default_rng(9 + r).integers(3, 61, PREFIX + r)
                rows.append(
                    cache.rows(
                        prefix_tokens=prefix[: 0 if nodes.stop else None],
                        tree=tree.take(np.arange(NODES)[cut]),
                    )
                )
            output = runner.forward(rows, hidden=hidden)
            hidden = output.hidden
            outputs += [output.hidden, *output.captured.values()]
            outputs += [] if output.logits is None else [output.logits]
    contents = [cache.storage[..., :PREFIX, :] for own in caches for cache in own]
    return [*outputs, *contents]


def _errors(model, cuts, make_cache=lambda runner: runner.new_cache(4), capture=()):
    found, expected = (
        _decode(_runners(model, cuts, backend, capture), make_cache)
        for backend in ("onnx", "eager")
    )
    return [(a - b).abs().max().item() for a, b in zip(found, expected, strict=True)]


@pytest.mark.parametrize("case", CASES)
def test_equals_eager(case):
    """Whole models and slices, two requests per pass, caches that grow, hidden states."""
    family, options = CASES[case]
    model = random_model(family, **SIZES, options=options)
    states = [HiddenName(1), HiddenName(3), HiddenName(3, normed=True)]
    for cuts in ((0, 4), (0, 1, 3, 4)):
        assert max(_errors(model, cuts, capture=states)) < TOLERANCE, cuts


@pytest.mark.parametrize("prefix", [PREFIX, 0])
def test_a_prompt_and_its_tree_in_one_pass(prefix):
    """Siblings once got the positions of a chain when they came with the first rows of a cache.

    The longest path fills the context: other branches once had more rows than the rotary tables.
    """
    outputs, tree = [], _tree(0)
    tree = TreeRows.within(
        prefix_len=prefix, node_ids=tree.node_ids, tokens=tree.tokens, parent_ids=tree.parent_ids
    )
    context = max(16, int(tree.positions.max()) + 1)
    assert context < PREFIX + NODES
    model = random_model("llama", **SIZES, max_positions=context)
    for backend in ("onnx", "eager"):
        (runner,) = _runners(model, [0, LAYERS], backend)
        cache = runner.new_cache(4)
        rows = cache.rows(prefix_tokens=np.arange(3, 3 + prefix), tree=tree)
        outputs.append((runner.forward([rows]).logits, cache.storage[..., : prefix + NODES, :]))
    for found, expected in zip(*outputs, strict=True):
        assert np.abs(found - expected).max() < TOLERANCE


def test_paged_caches():
    model = random_model("llama", **SIZES)

    def paged(runner):
        pool = BlockPool(spec=runner.spec, num_blocks=20, block_tokens=4)
        return runner.new_cache(4, pool)

    assert max(_errors(model, (0, 2, 4), make_cache=paged)) < TOLERANCE


@pytest.mark.parametrize(
    ("where", "name", "fault"),
    [
        (onnx_session, "host_mask", lambda rows, window: None),  # rows see all earlier ones
        (onnx_session, "host_mask", lambda rows, window: host_mask(rows, None)),
        (onnx_session, "host_mask", lambda rows, w: None if len(rows) == 1 else host_mask(rows, w)),
        (onnx_graph, "epsilon", lambda module: 0.1),
        (
            onnx_graph.GraphWriter,
            "split",
            lambda self, value, sizes: _split(self, value, sizes)[::-1],
        ),
    ],
)
def test_planted_faults_are_refused(monkeypatch, where, name, fault):
    """A graph or a mask with a mistake is found by the comparison when the runner is made."""
    model = random_model("mistral", **SIZES, options={"sliding_window": 3})
    _runners(model, (0, 4), "onnx")
    monkeypatch.setattr(where, name, fault)
    with pytest.raises(UserError, match="its outputs differ by"):
        _runners(model, (0, 4), "onnx")


_split = onnx_graph.GraphWriter.split


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("gpt2", {}, "no graphs of gpt2 models, only of llama, mistral, qwen2, qwen3"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ("llama", {"hidden_act": "gelu"}, "'gelu' is not silu"),
        ("llama", {"head_dim": 24}, "head size 24"),
    ],
)
def test_unsupported_models_are_refused(family, options, reason):
    model = random_model(family, **{**SIZES, "options": options})
    with pytest.raises(UserError, match=f"model.backend=onnx .*{reason}.* use model.backend=eager"):
        _runners(model, (0, 4), "onnx")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"dtype": "float64"}, "float32 only, not in float64"),
        ({"graphs": "replay"}, "it has no model.graphs=replay"),
        ({"family": "gpt2"}, "it has no graphs of gpt2 models"),
    ],
)
def test_options_without_onnx(given, reason):
    """``onnx`` names what it cannot do; ``auto`` is eager then, and onnx otherwise."""
    with pytest.raises(UserError, match=reason):
        _ = build_random(**{**PAIR, "backend": "onnx", **given}).backend
    assert build_random(**{**PAIR, "backend": "auto", **given}).backend == "eager"
    assert build_random(**PAIR, backend="auto").backend == "onnx"


def test_missing_packages(monkeypatch):
    monkeypatch.setattr(support, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"onnx and onnxruntime cannot be imported: pip install"):
        _ = build_random(**PAIR, backend="onnx").backend
    assert build_random(**PAIR, backend="auto").backend == "eager"


def test_shares_are_refused():
    pair = build_random(**PAIR, backend="onnx")
    with pytest.raises(UserError, match="cannot run shares of a tensor-parallel group"):
        pair.runner("draft", Meter(), Collective(rank=0, size=2))
