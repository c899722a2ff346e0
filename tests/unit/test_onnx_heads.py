"""EAGLE and Medusa heads in ONNX Runtime equal eager ones up to rounding.

Both compute in float32; a wrong state, position, mask or weight changes states by more than 0.01,
rounding by less than 1e-4.
"""

import numpy as np
import pytest
import torch

from specdec.clocks.meter import Meter
from specdec.errors import UserError
from specdec.models.eagle_runner import EagleRunner, rewritten
from specdec.models.medusa import MedusaHeads
from specdec.models.random import random_model
from specdec.pairs.random import build_random
from specdec.types import TreeRows
from tests import eagle

pytest.importorskip("onnxruntime", reason="pip install specdec-lab[onnx]")

TOLERANCE = 1e-4
PREFIX, NODES = 6, 9
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}


def _head(variant: str, **changes: object):
    """A head of ``tests.eagle`` in float32, with heads of 16 entries as the graphs need."""
    config = eagle.made({**eagle.SIZES, **eagle.VARIANTS[variant], "head_dim": 16, **changes})
    generator = torch.Generator().manual_seed(1)
    shape = config.layer.vocab_size, config.layer.hidden_size
    embedding = torch.randn(shape, generator=generator)
    output = torch.nn.Linear(*shape[::-1], bias=False)
    return eagle.random_head(config, embedding=embedding, output=output).float()


def _runners(head):
    return [EagleRunner(head, meter=Meter(), backend=name) for name in ("onnx", "eager")]


def _pass(runner: EagleRunner, rows, with_feature, seed: int, wanted=None):
    """States and logits of one pass over random features and outputs."""
    generator = torch.Generator().manual_seed(seed)
    config, num = runner.head.config, sum(map(len, rows))
    features = torch.randn(len(with_feature), config.feature_size, generator=generator)
    states = torch.randn(num - len(features), config.layer.hidden_size, generator=generator)
    out = runner.forward(
        rows,
        features=features,
        feature_rows=np.array(with_feature, np.int64),
        states=states,
        logits_rows=np.arange(num) if wanted is None else np.array(wanted, np.int64),
    )
    return [out.states, out.logits]


def _decode(runner: EagleRunner):
    """Outputs over prompts, corrected entries, trees and corrected nodes of two requests."""
    rng = np.random.default_rng(0)
    caches = [runner.new_cache(4) for _ in range(2)]
    prompts = [rng.integers(3, 48, PREFIX + i) for i in range(2)]
    found = _pass(
        runner,
        [cache.rows(prefix_tokens=p) for cache, p in zip(caches, prompts, strict=True)],
        range(2 * PREFIX + 1),
        seed=1,
        wanted=[],
    )
    parents = np.array([-1, 0, 0, 1, 2, -1, 5, 3, 3])
    tokens = rng.integers(3, 48, NODES)
    for seed, nodes in enumerate((slice(0, 3), slice(3, NODES))):
        rows, with_feature, start = [], [], 0
        for cache in caches:
            if not seed:  # entries of the prefix again, and one more token of it
                rows.append(rewritten(cache, tokens[:2], cache.cached_len - 2))
                rows.append(cache.rows(prefix_tokens=tokens[:1]))
                with_feature += [start, start + 1, start + 2]
                start += 3
            tree = TreeRows.within(
                prefix_len=cache.cached_len,
                node_ids=np.arange(NODES),
                tokens=tokens,
                parent_ids=parents,
            )
            rows.append(cache.rows(tree=tree.take(np.arange(NODES)[nodes])))
            with_feature += [start] if not seed else []
            start += len(rows[-1])
        found += _pass(runner, rows, with_feature, seed=2 + seed)
    return [*found, *(cache.storage[..., : PREFIX + 1 + NODES, :] for cache in caches)]


@pytest.mark.parametrize("variant", eagle.VARIANTS)
def test_equals_eager(variant):
    pairs = zip(*map(_decode, _runners(_head(variant))), strict=True)
    assert max((a - b).abs().max() for a, b in pairs if a.numel()) < TOLERANCE


def test_bits_of_a_weight():
    """Rounding changes states and logits of this small head by 2 % of their scale in 8 bits and by
    20 % in 4: the matrices are the head's, and the key is not ignored.
    """
    exact, found = _decode(EagleRunner(_head("eagle3"), meter=Meter())), {}
    for bits in (8, 4):
        runner = EagleRunner(_head("eagle3"), meter=Meter(), backend="onnx", bits=bits)
        pairs = zip(exact[:-2], _decode(runner)[:-2], strict=True)
        found[bits] = max(((a - b).std() / a.std()).item() for a, b in pairs if a.numel())
    assert 0 < found[8] < 0.05 < found[4] < 0.4, found


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_act": "gelu"}, "'gelu' is not silu"),
        ({"rope_parameters": DYNAMIC}, "'dynamic'"),
        ({"head_dim": 24}, "head size 24"),
    ],
)
def test_unsupported_heads(changes, reason):
    """``onnx`` refuses them by name; ``auto`` runs them in PyTorch."""
    head = _head("eagle3", **changes)
    with pytest.raises(UserError, match=f"this EAGLE head: .*{reason}.*model.backend=eager"):
        _runners(head)
    auto = build_random(dtype="float32", hidden_size=64, backend="auto")
    assert auto.backend == "onnx"
    assert auto.backend_of(head.config.layer) == "eager"
    assert auto.backend_of(_head("eagle3").config.layer) == "onnx"


# Medusa.

MEDUSA = {"dtype": "float32", "num_layers": 2, "hidden_size": 64}


def _weights(target, names):
    """Random weights of one head; those not named are the target's."""
    generator = torch.Generator().manual_seed(1)
    output = target.get_output_embeddings().weight
    width = output.shape[1]
    shapes = {"norm": (width,), "block": (width, width), "output": tuple(output.shape)}
    return {
        f"{name}.weight": 0.3 * torch.randn(shapes[name], generator=generator) for name in names
    }


HEADS = [("block",), (), ("norm", "block", "output")]


def _medusa(family="llama", backend="onnx", heads=HEADS):
    target = random_model(family, **MEDUSA)
    weights = [_weights(target, names) for names in heads]
    return MedusaHeads(target=target, heads=weights, meter=Meter(), backend=backend)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_medusa_heads_equal_eager_ones(family):
    """Heads with their own norm, block and output, and with the target's; one row and several."""
    found, expected = _medusa(family), _medusa(family, "eager")
    generator = torch.Generator().manual_seed(2)
    kept = []
    for rows in (1, 3, 8):
        hidden = torch.randn(rows, 64, generator=generator)
        for number in range(1, len(HEADS) + 1):
            logits, eager = found.logits(number, hidden), expected.logits(number, hidden)
            assert eager.std() > 0.01
            assert (logits - eager).abs().max() < TOLERANCE
            kept.append((logits, logits.clone()))
    assert all(torch.equal(now, then) for now, then in kept), "a later pass changed them"


def test_medusa_heads_of_an_unsupported_family_are_refused():
    """``onnx`` refuses it by name; with ``auto`` the pair runs everything in PyTorch."""
    with pytest.raises(UserError, match=r"Medusa heads: .*gpt2.*model.backend=eager"):
        _medusa("gpt2", heads=[()])
