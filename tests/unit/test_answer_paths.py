"""Answers are sampled along the target's path only, where no part reads the others."""

from dataclasses import replace

import pytest

from specdec.compose.workbench import Parts, Workbench
from specdec.policies import BestFirst
from specdec.sampling.transform import SamplingParams
from specdec.sources import DraftModelSource
from specdec.state import StopRules
from specdec.testing import Case, RandomPair, decode_cases
from specdec.types import NO_TOKEN, Lossless
from specdec.verifiers import MatchVerifier


def _composed(verifier: MatchVerifier) -> Parts:
    pair = RandomPair(num_layers=4, hidden_size=16, num_heads=2, vocab_size=24, logit_scale=3.0)
    bench = Workbench(pair, seed=2)
    source = DraftModelSource(runner=pair.runner("draft", bench.meter))
    policy = BestFirst(bs=12, w=4, d=3)
    return bench.parts(source=source, policy=policy, verifier=verifier)


def _decoded(
    parts: Parts,
    sampling: SamplingParams = SamplingParams(temperature=1.0),  # noqa: B008 - frozen
) -> tuple[int, tuple[int, ...]]:
    """(rows without a token, output) of one request."""
    found = []
    collect = parts.executor.collect

    def counted(*, wait: bool = True):
        output = collect(wait=wait)
        found.extend((a.tokens == NO_TOKEN).sum() for a in output.answers)
        return output

    parts.executor.collect = counted  # type: ignore[method-assign]
    stop = StopRules(max_new_tokens=16)
    outputs = decode_cases(parts, [Case(5, "", (2, 3, 4), sampling, stop)])
    return int(sum(found)), outputs[5].output


def test_only_verifiers_that_take_the_targets_own_tokens_go_without() -> None:
    verifier = MatchVerifier()
    assert _decoded(_composed(verifier))[0] > 10
    verifier.lossless = Lossless.LOSSY
    assert _decoded(_composed(verifier))[0] == 0
    asking = MatchVerifier()
    asking.needs = replace(asking.needs, all_answers=True)
    assert _decoded(_composed(asking))[0] == 0


def test_greedy_answers_of_many_logits_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few are sampled in one call, so small models show nothing of this branch."""
    whole = _decoded(_composed(MatchVerifier()), SamplingParams())
    monkeypatch.setattr("specdec.executors.stage._FEW_LOGITS", 0)
    part = _decoded(_composed(MatchVerifier()), SamplingParams())
    assert whole[0] == 0 < part[0]
    assert part[1] == whole[1]
