"""Early exit: heads, the front that drafts and verifies once, the pipeline, and PPSD's laws.

Letters: N layers of the target, E layers before the exit, S layers of a stage.
"""

from collections import Counter
from functools import partial
from math import ceil
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments.ppsd import laws
from specdec.clocks import LatencyProfile, SimulatedClock
from specdec.compose.workbench import Parts, Workbench, build
from specdec.errors import UserError
from specdec.executors.layout import EarlyExitPlan
from specdec.metrics.speedup import expected_accepted
from specdec.models.exits import (
    HeadWeights,
    head_model,
    untrained_head,
)
from specdec.models.frozen import FrozenModel
from specdec.models.random import random_model
from specdec.models.slicing import final_norm
from specdec.pairs.random import build_random
from specdec.sampling.transform import SamplingParams
from specdec.sources.early_exit import ppsd_law
from specdec.testing import RandomPair
from specdec.train.drafter import OutputOptions, as_stored
from specdec.train.heads import ExitDrafter, ExitSpec
from specdec.types import Nodes
from tests import toys
from tests.pretrained import pretrained
from tests.shapes import saved_llama
from tests.states import new_request

STAGE_S = 1.0
PROFILE = toys.priced(stage=1000 * STAGE_S)
SIZES = {"hidden_size": 16, "num_heads": 2, "vocab_size": 24, "max_positions": 64, "seed": 3}


def pair(num_layers: int = 4, exit_layer: int = 3, exit_head: str = "norm") -> RandomPair:
    return build_random(num_layers=num_layers, exit_layer=exit_layer, exit_head=exit_head, **SIZES)


class TestLaws:
    def test_expected_length_is_the_sum_it_stands_for(self) -> None:
        for alpha in (0.0, 0.3, 0.8, 1.0):
            for gamma in (1, 4, 9):
                stopped = sum(h * alpha**h * (1 - alpha) for h in range(gamma))
                expected = stopped + gamma * alpha**gamma
                assert expected_accepted(alpha, gamma) == pytest.approx(expected)

    def test_shallow_stages_join_eq6_where_a_stage_is_an_exit(self) -> None:
        for alpha in (0.0, 0.5, 1.0):
            deep = laws.eq6_speedup(alpha, 3, 24)
            assert ppsd_law(3, 24, 8).speedup(alpha) == pytest.approx(deep)
        assert ppsd_law(6, 24, 8).speedup(0.5) == pytest.approx(24 / (3 + 12))


def simulated(
    models: RandomPair, build: object, profile: LatencyProfile = PROFILE, **options: object
) -> tuple[Parts, list[float]]:
    """Decodes one prompt on a clock that charges 1 s per stage; emission times."""
    clock = SimulatedClock(profile)
    parts = build(Workbench(models, seed=1, clock=clock), **options)  # type: ignore[operator]
    request = new_request(1, (3,), 24, SamplingParams(temperature=0.4))
    with torch.inference_mode():
        for _ in parts.decode(parts.new_state(), [request]):
            pass
    counters = request.counters
    assert min(counters.hits + counters.accepted, counters.misses) >= 2, "a case without both"
    return parts, request.emitted_s


class TestSchedule:
    @pytest.mark.parametrize(("exit_layer", "stages"), [(4, 4), (3, 3)])
    def test_a_hit_costs_the_steps_of_a_draft_and_a_miss_the_whole_way(
        self, exit_layer: int, stages: int
    ) -> None:
        """PPSD 4.2: with S = E one step per accepted token; with S < E, E / S of them."""
        models = pair(num_layers=8, exit_layer=exit_layer)
        _, times = simulated(models, partial(build, "ppsd"), stages=stages)
        steps = np.diff(times)
        size = exit_layer if stages == ceil(8 / exit_layer) else 8 / stages
        assert set(Counter(steps.tolist())) == {exit_layer / size * STAGE_S, stages * STAGE_S}

    @pytest.mark.parametrize(
        ("stage", "head", "leave", "send", "lock_step"),
        [(4.18, 0.68, 1.72, 0, False), (4, 1, 2, 1, True)],
    )
    def test_free_running_follows_its_closed_form(
        self, stage: float, head: float, leave: float, send: float, lock_step: bool
    ) -> None:
        """A rejected token costs whole passes of the first stage until the answer is there."""
        prices = {"stage": stage, "head": head, "exit": leave, "transfer": send}
        profile = toys.priced(**{kind: 1000.0 * ms for kind, ms in prices.items()})
        models = pair(num_layers=8, exit_layer=1)
        parts, times = simulated(models, partial(build, "ppsd"), profile, lock_step=lock_step)
        walk = laws.walk_ms(8, stage, head, send)
        accepted, rejected = laws.free_costs_ms(8, stage, leave, head, send)
        assert rejected == ceil(walk / accepted) * accepted < 8 * accepted
        costs = {accepted, 8 * accepted} if lock_step else {accepted, rejected}
        steps = np.diff(times)[:-8]  # later the first stage may have nothing left to draft
        assert set(steps.round(6).tolist()) == {round(cost, 6) for cost in costs}
        assert parts.clock.busy_s is not None
        assert parts.clock.busy_s[1] <= times[-1]  # passes that never ran are not counted

    @pytest.mark.parametrize("lock_step", [False, True])
    def test_the_last_stage_computes_every_chunk_of_a_prompt(self, lock_step: bool) -> None:
        clock = SimulatedClock(PROFILE)
        bench = Workbench(pair(num_layers=8, exit_layer=2), clock=clock)
        parts = build("ppsd", bench, lock_step=lock_step)
        request = new_request(1, range(2, 12), 1)  # three chunks, and the last token
        list(parts.decode(parts.new_state(), [request], prefill_chunk=3))
        assert clock.busy_s[4] == pytest.approx(4 * STAGE_S)

    def test_a_round_of_eesd_costs_gamma_e_plus_n(self) -> None:
        """The denominator of Eq. 4, in stages of E layers, with heads that have a cost."""
        gamma, head_s, whole_s = 3, 0.25, 4 * STAGE_S + 0.5
        profile, models = toys.priced(stage=1e3, exit=250, head=500), pair(8, exit_layer=2)
        parts, times = simulated(models, partial(build, "eesd"), profile, gamma=gamma)
        rounds = np.diff(np.unique(times))[:-2]  # drafts are cut short at the end of the request
        draft_s = STAGE_S + head_s
        assert set(rounds.tolist()) == {gamma * draft_s + whole_s}
        drafts, verified = parts.source.counters, parts.executor.counters.passes
        assert drafts.passes == drafts.rows == (times[-1] - verified * whole_s) / draft_s


class TestHeads:
    def test_a_saved_head_computes_the_same_in_the_decoder(self, tmp_path: Path) -> None:
        """The same logits within bfloat16 of the file; heads with a block are in test_train.py."""
        target, layer = FrozenModel(saved_llama(tmp_path / "target", 3)), 1
        spec = ExitSpec(head="norm", layers=(layer,))
        trained = ExitDrafter(target, spec, OutputOptions(matrix="own"), None)
        as_stored(trained)
        trained.save(tmp_path / "heads")
        files = {"exit_head": "norm", "exit_heads": str(tmp_path / "heads")}
        loaded = pretrained(tmp_path / "target", exit_layer=layer, **files)
        bench = Workbench(loaded)
        front = bench.make_first_stage(EarlyExitPlan.of_stages(loaded, 2), (layer,))
        request = new_request(5, (2,), 14)
        front.open(request.id, request.num_prompt + request.stop.max_new_tokens)
        parts = build("eesd", bench, gamma=1)
        state = parts.new_state()
        state.requests[request.id] = request
        _, logits = front.logits(state, Nodes(((request.id, request.tree.ids[:1]),)))
        tokens = torch.tensor([[2]])
        head, stream = trained.heads[0], target.residuals(tokens, {layer})[layer]
        with torch.no_grad():
            expected = trained.outputs[0](head(head.inner(target, stream)[0, -1:]))[0]
        assert torch.allclose(logits[0], expected, atol=1e-3)
        with pytest.raises(UserError, match="specdec train exit"):
            loaded.artefact(HeadWeights, layer=2)

    def test_a_head_model_shares_and_changes_nothing(self) -> None:
        target = random_model("gpt2", num_layers=4)
        before = {name: p.clone() for name, p in target.named_parameters()}
        made = head_model(target, untrained_head(target, "norm", 2))
        assert len(list(made.transformer.h)) == 3
        assert final_norm(made) is not final_norm(target)
        for name, parameter in target.named_parameters():
            assert torch.equal(before[name], parameter)
