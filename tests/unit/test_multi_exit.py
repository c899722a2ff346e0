"""Several exits, one chosen per token: the choice and what it costs (PPSD B.3)."""

from collections import Counter
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from heads import cases

from experiments.ppsd.laws import eq4_speedup, eq6_speedup
from specdec.compose.workbench import Workbench, build
from specdec.sampling.transform import SamplingParams
from specdec.state import DecodeState, StopRules
from specdec.testing import Case, RandomPair, decode_cases
from specdec.types import BoolArray, Nodes
from specdec.verifiers import RejectionVerifier
from strategies.multi_exit import ExitChances, MultiExitSource, eesd_saving, ppsd_saving
from tests.unit.test_early_exit import pair, simulated


def chosen_by(monkeypatch: pytest.MonkeyPatch, chances: Callable[[int, float], float]) -> None:
    """Lets ``chances``(exit, confidence) alone choose."""
    monkeypatch.setattr(
        ExitChances, "expected", lambda self, asked, other, sure: chances(other, sure)
    )
    monkeypatch.setattr(MultiExitSource, "_saving", lambda self, alpha, at, reach: alpha)


class TestChoice:
    def test_savings_order_exits_as_the_equations_do(self) -> None:
        """Eq. 6 at one alpha per exit; and one more layer of draft has to pay for itself."""
        for alphas in ((0.5, 0.55), (0.5, 0.6), (0.9, 0.95)):
            laws = [eq6_speedup(a, e, 24) for a, e in zip(alphas, (3, 6), strict=True)]
            savings = [ppsd_saving(a, e, 24) for a, e in zip(alphas, (3, 6), strict=True)]
            assert (laws[0] > laws[1]) == (savings[0] > savings[1])
        assert eesd_saving(0.5, 1.0, 3, 24) > 0 > eesd_saving(0.5, 0.2, 3, 24)
        assert (eq4_speedup(0.5, 1, 3, 24) > 1) == (eesd_saving(0.5, 1.0, 3, 24) > 0)

    def test_chances_start_from_what_an_exit_says_and_end_at_what_was_seen(self) -> None:
        chances = ExitChances(2)
        assert chances.expected(0, 0, 0.3) == pytest.approx(0.3)
        assert chances.expected(0, 1, 0.3) == pytest.approx(1 - 0.7 * 0.8)
        rng = np.random.default_rng(0)
        for right in rng.random((400, 2)) < (0.75, 0.9):
            said = {at: (int(right[at]), 0.3) for at in range(2)}
            chances.learn(said, 1)
        assert chances.expected(0, 0, 0.3) == pytest.approx(0.75, abs=0.06)  # 3 sigma
        assert chances.expected(0, 1, 0.3) == pytest.approx(0.9, abs=0.05)
        assert chances.expected(0, 0, 0.8) == pytest.approx(0.8)  # nothing seen there


class TestCost:
    @pytest.mark.parametrize("at", [0, 1])
    def test_a_token_costs_the_way_to_its_exit(
        self, at: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """In a pipeline, steps up to the exit for a hit and all of them for a miss."""
        chosen_by(monkeypatch, lambda other, _: float(other == at))
        models = pair(num_layers=8, exit_layer=2)
        _, times = simulated(models, partial(build, "ppsd_multi"), further_exits=[6])
        assert set(Counter(np.diff(times).tolist())) == {(1.0, 3.0)[at], 4.0}

    @pytest.mark.parametrize("at", [0, 1])
    def test_a_draft_costs_the_layers_to_its_exit_and_no_layer_twice(
        self, at: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Eq. 4's denominator with the exit's own depth: gamma E + N."""
        chosen_by(monkeypatch, lambda other, _: float(other == at))
        models = pair(num_layers=8, exit_layer=2)
        _, times = simulated(models, partial(build, "eesd_multi"), gamma=2, further_exits=[6])
        rounds = np.diff(np.unique(times))[:-2]  # drafts are cut short at the end
        assert set(rounds.tolist()) == {2 * (1.0, 3.0)[at] + 4.0}


class TestSampled:
    def test_nothing_is_learned_where_candidates_are_sampled(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The proposal must be a function of the tokens before it, or rejection is biased."""

        def learn(self: ExitChances, said: object, token: int) -> None:
            raise AssertionError("learned")

        monkeypatch.setattr(ExitChances, "learn", learn)
        models: RandomPair = pair(num_layers=6, exit_layer=2)
        parts = build(
            "eesd_multi", Workbench(models, seed=1), gamma=2, verifier=RejectionVerifier()
        )
        state = parts.new_state()
        with torch.inference_mode():
            for _ in parts.decode(state, [cases(1)[0].request()]):
                pass
        matched = build("eesd_multi", Workbench(models, seed=1), gamma=2)
        with pytest.raises(AssertionError, match="learned"):
            decode_cases(matched, cases(), batch_size=2, prefill_chunk=3)

    @pytest.mark.parametrize("stages", [2, 4])
    def test_the_exit_follows_from_the_tokens_before(
        self, stages: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whatever is drawn: then a candidate is a sample of the law that rejection divides by.

        By tokens up to a node: whether it went on from the first exit, of ten requests each.
        """
        found: dict[tuple[int, ...], set[bool]] = {}
        goes_on = MultiExitSource._prefers_later

        def noting(self: MultiExitSource, state: DecodeState, nodes: Nodes, at: int) -> BoolArray:
            mask = goes_on(self, state, nodes, at)
            rows = iter(mask.tolist())
            for request_id, ids in nodes.items:
                tree = state.requests[request_id].tree
                for node_id, slot in zip(ids.tolist(), tree.slots(ids).tolist(), strict=True):
                    went = next(rows)
                    if at == 0 and 0 in self._tops[request_id].get(node_id, {}):
                        path = state.requests[request_id].path_tokens(slot)
                        found.setdefault(tuple(path.tolist()), set()).add(went)
            return mask

        monkeypatch.setattr(MultiExitSource, "_prefers_later", noting)
        bench = Workbench(pair(num_layers=6, exit_layer=2), seed=1)
        parts = build("ppsd_multi", bench, stages=stages, verifier=RejectionVerifier())
        stop, rule = StopRules(max_new_tokens=3), SamplingParams(temperature=0.5)
        prompts = [(token,) for token in range(6) for _ in range(10)]
        requests = [Case(i, "", prompt, rule, stop) for i, prompt in enumerate(prompts)]
        decode_cases(parts, requests, batch_size=30)
        assert {(True,), (False,)} == {tuple(went) for went in found.values()}
