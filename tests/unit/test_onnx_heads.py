"""EAGLE heads in ONNX Runtime equal eager ones up to rounding, over trees and several requests.

Both compute in float32; a wrong state, position, mask or weight changes states by more than 0.01
(see the planted faults), rounding by less than 1e-4.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specdec.api import Decoder
from specdec.clocks.meter import Meter
from specdec.errors import UserError
from specdec.models import onnx_eagle, onnx_graph, onnx_session
from specdec.models.eagle import EagleConfig
from specdec.models.eagle_runner import EagleRunner, rewritten
from specdec.pairs.random import build_random
from tests import eagle

pytest.importorskip("onnxruntime", reason="pip install specdec-lab[onnx]")

TOLERANCE = 1e-4
PREFIX, NODES = 6, 9
PAIR = build_random(dtype="float32", hidden_size=64, num_layers=4, vocab_size=48, backend="onnx")


def _head(variant: str, **changes: object):
    """A head of ``tests.eagle`` in float32, with heads of 16 entries as the graphs need."""
    sizes = {**eagle.SIZES, **eagle.VARIANTS[variant], "head_dim": 16, **changes}
    config = EagleConfig(**sizes)
    generator = torch.Generator().manual_seed(1)
    shape = config.vocab_size, config.hidden_size
    embedding = torch.randn(shape, generator=generator)
    output = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
    return eagle.random_head(config, embedding=embedding, output=output).float()


def _runners(head):
    return [EagleRunner(head, meter=Meter(), backend=name) for name in ("onnx", "eager")]


def _pass(runner: EagleRunner, rows, with_feature, seed: int, wanted=None):
    """States and logits of one pass over random features and outputs."""
    generator = torch.Generator().manual_seed(seed)
    config, num = runner.head.config, sum(map(len, rows))
    features = torch.randn(len(with_feature), config.feature_size, generator=generator)
    states = torch.randn(num - len(features), config.hidden_size, generator=generator)
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
    depths = np.zeros(NODES, np.int64)
    for node in range(NODES):
        depths[node] = depths[parents[node]] + 1 if parents[node] >= 0 else 0
    tokens = rng.integers(3, 48, NODES)
    for seed, nodes in enumerate((slice(0, 3), slice(3, NODES))):
        rows, with_feature, start = [], [], 0
        for cache in caches:
            if not seed:  # entries of the prefix again, and one more token of it
                rows.append(rewritten(cache, tokens[:2], cache.cached_len - 2))
                rows.append(cache.rows(prefix_tokens=tokens[:1]))
                with_feature += [start, start + 1, start + 2]
                start += 3
            rows.append(
                cache.rows(
                    node_ids=np.arange(NODES)[nodes],
                    node_tokens=tokens[nodes],
                    parent_ids=parents[nodes],
                    node_positions=cache.cached_len + depths[nodes],
                )
            )
            with_feature += [start] if not seed else []
            start += len(rows[-1])
        found += _pass(runner, rows, with_feature, seed=2 + seed)
    return [*found, *(cache.storage[..., : PREFIX + 1 + NODES, :] for cache in caches)]


def _error(runners) -> float:
    pairs = zip(*map(_decode, runners), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs if a.numel())


@pytest.mark.parametrize("variant", eagle.VARIANTS)
def test_equals_eager(variant):
    assert _error(_runners(_head(variant))) < TOLERANCE


def test_adjacent_rows_share_a_call(monkeypatch):
    """Corrected entries, new ones and nodes of one request are one session call."""
    runner, _ = _runners(_head("eagle3"))
    calls = []
    run = onnx_session.CacheSession.run
    monkeypatch.setattr(
        onnx_session.CacheSession, "run", lambda *args: (calls.append(len(args[1])), run(*args))
    )
    cache = runner.new_cache(4)
    _pass(runner, [cache.rows(prefix_tokens=np.arange(4))], range(4), seed=0)
    rows = [rewritten(cache, np.array([7, 8]), 2), cache.rows(prefix_tokens=np.array([9]))]
    rows.append(
        cache.rows(
            node_ids=np.array([0]),
            node_tokens=np.array([5]),
            parent_ids=np.array([-1]),
            node_positions=np.array([5]),
        )
    )
    _pass(runner, rows, range(4), seed=1)
    assert calls[-2:] == [4, 4]


def _swapped(writer, value, sizes):
    return _split(writer, value, sizes)[::-1]


_split = onnx_graph.GraphWriter.split


@pytest.mark.parametrize(
    ("where", "name", "fault"),
    [
        (onnx_session, "host_mask", lambda rows, window: None),  # rows see all earlier ones
        (onnx_graph, "epsilon", lambda module: 0.1),
        (onnx_graph.GraphWriter, "split", _swapped),  # gate and up, or the target's streams
        (onnx_eagle, "_joined", iter),  # a part sees no other's entries: still right
    ],
)
def test_planted_faults_are_refused(monkeypatch, where, name, fault):
    """A graph or a mask with a mistake is found by the comparison when the runner is made."""
    head = _head("eagle3.1")
    monkeypatch.setattr(where, name, fault)
    if fault is iter:  # the control: rows that share no call give the same results
        assert _error(_runners(head)) < TOLERANCE
        return
    with pytest.raises(UserError, match="this EAGLE head: its outputs differ by"):
        _runners(head)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"activation": "gelu"}, "'gelu' is not silu"),
        ({"rope": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "'dynamic'"),
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
    assert auto.backend_of(head.config.llama()) == "eager"
    assert auto.backend_of(_head("eagle3").config.llama()) == "onnx"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["eagle3", "eagle2"])
@pytest.mark.parametrize("sampling", ["greedy", "t06"])
def test_outputs_are_those_of_plain_decoding(strategy, sampling):
    """An untrained head: its proposals are poor, and every output is the target's own."""
    words = [f"sampling={sampling}", "max_new_tokens=16"]
    outputs = []
    for name in ("ar", strategy):
        with Decoder([f"strategy={name}", *words], pair=PAIR) as decoder:
            outputs.append(decoder.generate([5, 6, 7, 8]).tokens)
    assert outputs[0] == outputs[1]
