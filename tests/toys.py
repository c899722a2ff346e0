"""A small random pair, requests under several samplings, and what plain decoding makes of them."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from specdec.certify.cases import GREEDY, TEMPERATURES_AND_FILTERS, WITH_HISTORY, Case, parity_cases
from specdec.certify.oracle import Oracle
from specdec.clocks import Clock, CostCurve, LatencyProfile, SimulatedClock
from specdec.pairs import RandomPair

SEED = 3
VOCAB = 48
MODEL: dict[str, Any] = {
    "num_layers": 4,
    "draft_layers": 3,
    "hidden_size": 16,
    "vocab_size": VOCAB,
    "logit_scale": 4.0,
}
SAMPLINGS = {
    "greedy": GREEDY,
    "t=1": TEMPERATURES_AND_FILTERS["t=1"],
    "t=0.9 no_repeat_ngram=2": TEMPERATURES_AND_FILTERS["t=0.9 no_repeat_ngram=2"],
    "repetition penalty": WITH_HISTORY["repetition penalty"],
}


@cache
def pair(draft_layers: int = 3) -> RandomPair:
    """A target of four layers; a draft of four is perfect, one of three agrees often."""
    return RandomPair(**{**MODEL, "draft_layers": draft_layers})


@cache
def oracle() -> Oracle:
    """Plain decoding without this library's loop, trees and caches."""
    return Oracle(pair().target, seed=SEED)


@cache
def cases(num_tokens: int = 16) -> tuple[Case, ...]:
    """Greedy and sampled requests, two of four samplings with a history."""
    return tuple(parity_cases(SAMPLINGS, per_sampling=2, vocab_size=VOCAB, num_tokens=num_tokens))


@cache
def plain(case: Case) -> tuple[int, ...]:
    """The target's own output for a case."""
    return oracle().decode(case).output


def assert_plain(outputs: dict[int, Any], wanted: Sequence[Case]) -> None:
    assert sorted(outputs) == sorted(case.id for case in wanted)
    wrong = [case.label for case in wanted if outputs[case.id].output != plain(case)]
    assert not wrong, f"not the output of plain decoding: {wrong}"


def priced(**costs_ms: float) -> LatencyProfile:
    """Constant costs by kind of work; everything else costs nothing."""
    curves = {kind: CostCurve(tokens=(1,), ms=(ms,)) for kind, ms in costs_ms.items()}
    return LatencyProfile(name="toy", costs=curves)  # type: ignore[arg-type]


def profile(target_ms: float, draft_ms: float) -> LatencyProfile:
    return priced(stage=target_ms, draft=draft_ms)


def simulated(target_ms: float, draft_ms: float) -> Clock:
    return SimulatedClock(profile(target_ms, draft_ms))
