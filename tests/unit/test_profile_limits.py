"""Bytes and FLOPs of passes against counts by hand, and the limits that they are compared with."""

from __future__ import annotations

import pytest
import torch

from specdec.clocks import Work
from specdec.pairs.random import build_random
from specdec.profiling.limits import (
    MachineLimits,
    PassCost,
    measure_machine,
    passes_of,
    roofline_png,
)
from specdec.profiling.passes import Sample

SIZES = {"num_layers": 4, "hidden_size": 64, "vocab_size": 61, "dtype": "float32"}
MACHINE = MachineLimits(copy_bytes=1, bytes_per_s=1e9, flops_per_s=2e9)


def _passes(stages: int, context: int, rows: tuple[int, ...]) -> dict[tuple[str, int], PassCost]:
    pair = build_random(**SIZES)
    samples = {
        kind: [Sample(num, (2.0, 4.0, 3.0)) for num in rows]
        for kind in (Work.STAGE, Work.HEAD, Work.DRAFT, Work.PRUNE)
    }
    found = passes_of(pair, samples, stages=stages, context=context)
    return {(work.kind, work.rows): work for work in found}


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_counts_are_those_by_hand(stages: int) -> None:
    """Of the longest slice of layers; of the output head alone; of the whole draft."""
    pair = build_random(**SIZES)
    config = pair.target.config
    layers = -(-pair.num_layers // stages)
    size = config.head_dim
    weights = sum(p.numel() for p in pair.target.model.layers[:layers].parameters())
    context, rows = 20, 3
    found = _passes(stages, context, (1, rows))
    stage = found["stage", rows]
    cached = 2 * layers * config.num_key_value_heads * size  # numbers per token
    assert stage.num_bytes == 4 * (weights + cached * (context + 2 * rows))
    attention = 4 * layers * config.num_attention_heads * size * rows * (context + rows)
    assert stage.flops == 2 * rows * weights + attention
    head = found["head", rows]
    assert head.num_bytes == 4 * 61 * 64
    assert head.flops == 2 * rows * 61 * 64
    draft = pair.draft
    both = [*draft.model.layers.parameters(), *draft.get_output_embeddings().parameters()]
    cached = 2 * len(draft.model.layers) * draft.config.num_key_value_heads * draft.config.head_dim
    expected = 4 * (sum(p.numel() for p in both) + cached * (context + 2))
    assert found["draft", 1].num_bytes == expected
    assert all(work.ms == 3.0 for work in found.values())


def test_the_longer_time_bounds() -> None:
    moving = PassCost(kind="stage", rows=1, num_bytes=4_000_000, flops=2_000_000, ms=8.0)
    assert moving.to_json(MACHINE)["bound"] == "bytes"
    assert moving.bound_ms(MACHINE) == pytest.approx(4.0)
    assert moving.share(MACHINE) == pytest.approx(0.5)
    computing = PassCost(kind="stage", rows=9, num_bytes=4_000_000, flops=12_000_000, ms=8.0)
    assert computing.to_json(MACHINE)["bound"] == "flops"
    assert computing.share(MACHINE) == pytest.approx(0.75)
    unmeasured = PassCost(kind="head", rows=1, num_bytes=1, flops=1, ms=0.0)
    assert unmeasured.share(MACHINE) is None


def test_the_machine_is_measured_and_drawn() -> None:
    found = measure_machine(num_bytes=5_000_000, dtype=torch.float32, device=torch.device("cpu"))
    assert found.copy_bytes == 5_000_000
    assert min(found.bytes_per_s, found.flops_per_s) > 0
    works = [*_passes(1, 8, (1, 4, 16)).values()]
    works.append(PassCost(kind="head", rows=32, num_bytes=9, flops=9, ms=0.0))  # noise: no time
    assert roofline_png(found, works).startswith(b"\x89PNG")
