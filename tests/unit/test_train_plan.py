"""How a draft begins, and the cycles of a training plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specdec.train.draft import DistillationLoss, divergence
from specdec.train.model import LanguageModel, ModelShape
from specdec.train.plan import Phase, RunPlan


def test_distillation_compares_at_its_temperature():
    shape = ModelShape(
        num_layers=1,
        vocab_size=32,
        hidden=16,
        feed_forward=24,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
    )
    target, draft = (
        LanguageModel(shape, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)
    )
    tokens = torch.arange(12)[None]
    by_hand = divergence(2 * draft(tokens)[0], 2 * target(tokens)[0])
    loss = DistillationLoss(target, temperature=0.5)
    torch.testing.assert_close(loss(draft, tokens, tokens), by_hand)
    assert not torch.isclose(by_hand, divergence(draft(tokens)[0], target(tokens)[0]))
    with pytest.raises(ValueError, match=r"temperature=0.0 cannot be used"):
        DistillationLoss(target, temperature=0.0)


def test_a_restart_begins_a_cycle_at_the_peak():
    schedule = RunPlan(
        phases=(Phase(until=1.0, layers=1, length=8, batch=1),),
        max_steps=100,
        warmup_steps=1,
        decay_from=0.5,
        restarts=(0.4,),
    )
    rates = [schedule.rate_at(step / 100, 99) for step in (0, 20, 30, 39, 40, 70, 85, 100)]
    assert rates == pytest.approx([1.0, 1.0, 0.5, 0.05, 1.0, 1.0, 0.5, 0.0])
    assert [schedule.cycle_at(at) for at in (0.0, 0.39, 0.4, 1.0)] == [0, 0, 1, 1]
    halved = replace(schedule, cycle_rates=(1.0, 0.5))
    assert [halved.rate_at(step / 100, 99) for step in (20, 40, 85)] == pytest.approx(
        [1.0, 0.5, 0.25]
    )
    with pytest.raises(ValueError, match="2 cycles need as many cycle_rates"):
        replace(schedule, cycle_rates=(1.0,))
    with pytest.raises(ValueError, match="restarts must rise"):
        RunPlan(phases=schedule.phases, max_steps=1, restarts=(0.5, 0.2))
