"""What every source owes the loop, whatever it proposes from (``specdec.testing.check_source``)."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specdec.interfaces import TokenSource
from specdec.sampling.transform import SamplingParams
from specdec.sources import (
    DraftModelSource,
    KatzModel,
    MixtureSource,
    NGramSource,
    NullSource,
    PromptLookupSource,
    RandomSource,
    SuffixSource,
    SyntheticPair,
    SyntheticSource,
)
from specdec.state import DecodeState
from specdec.testing import check_source
from specdec.types import Candidates, Nodes
from strategies.staged import StagedSource

from .support import VOCAB, expand, make_request, make_runner, make_state, open_request, tiny_model

MODEL = tiny_model()
KATZ = KatzModel(
    np.random.default_rng(0).integers(0, VOCAB, 900), order=3, vocab_size=VOCAB, separator=0
)
TEMPERATE = SamplingParams(temperature=0.7, top_k=10, top_p=0.9)
NO_REPEAT = SamplingParams(temperature=0.7, no_repeat_ngram=2)


def draft(**options: Any) -> DraftModelSource:
    return DraftModelSource(runner=make_runner(MODEL), prefill_chunk=16, **options)


def ngram(**options: Any) -> NGramSource:
    return NGramSource(katz=KATZ, **options)


PATH_SOURCES: dict[str, Callable[[], TokenSource]] = {
    "draft model": draft,
    "draft model, sampled": lambda: draft(sample=True),
    "draft model, target's draws": lambda: draft(guess_draw=True),
    "n-gram": ngram,
    "n-gram, sampled": lambda: ngram(sample=True),
    "random": lambda: RandomSource(vocab_size=VOCAB),
    "mixture": lambda: MixtureSource(sources=[ngram(), draft()], confident=0.3),
    "mixture, sampled": lambda: MixtureSource(
        sources=[ngram(sample=True), draft(sample=True)], sample=True
    ),
    "staged": lambda: StagedSource(draft=draft(), cheap=ngram(), guess_rows=4),
    "staged, sampled": lambda: StagedSource(draft=draft(sample=True), cheap=ngram(sample=True)),
}
"""Sources without a memory: their candidates are a function of the tokens up to the node."""

SOURCES: dict[str, Callable[[], TokenSource]] = {
    **PATH_SOURCES,
    "prompt lookup": PromptLookupSource,
    "suffix": lambda: SuffixSource(vocab_size=VOCAB),
    "synthetic": lambda: SyntheticSource(pair=SyntheticPair(vocab_size=256)),
    "nothing": NullSource,
}


@pytest.mark.parametrize("name", PATH_SOURCES)
@pytest.mark.parametrize("sampling", [TEMPERATE, NO_REPEAT])
def test_candidates_depend_on_the_tokens_up_to_the_node(
    name: str, sampling: SamplingParams
) -> None:
    assert check_source(PATH_SOURCES[name], vocab_size=VOCAB, sampling=sampling) > 20


def holders(source: object, request_id: int) -> list[str]:
    """Where a source has a mapping with the key ``request_id``; model pairs may have more."""
    found, seen, left = [], set(), [(source, type(source).__name__)]
    while left:
        value, where = left.pop()
        if id(value) in seen or where.endswith("._pair"):
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            found += [where] if request_id in value else []
            left += [(part, where) for part in value.values()]
        elif isinstance(value, list | tuple):
            left += [(part, where) for part in value]
        elif type(value).__module__.startswith(("specdec.sources", "specdec.types", "strategies")):
            names = [*getattr(value, "__dict__", ()), *getattr(type(value), "__slots__", ())]
            left += [(getattr(value, name, None), f"{where}.{name}") for name in names]
    return found


@pytest.mark.parametrize("name", SOURCES)
def test_shapes_and_what_is_left_of_a_closed_request(name: str) -> None:
    rng, source, state = np.random.default_rng(1), SOURCES[name](), make_state()
    if name not in PATH_SOURCES:
        check_source(SOURCES[name], vocab_size=VOCAB, sampling=TEMPERATE, memory=True)
    for request_id in (4001, 4002):
        prompt = rng.integers(0, VOCAB, 12)
        open_request(state, source, make_request(request_id, prompt, sampling=TEMPERATE))
        expand(state, source, {request_id: [0]}, 2)
    assert source.counters.passes == sum(source.counters.by_level.values())
    assert holders(source, 4001) or name.startswith(("n-gram", "random", "nothing"))
    for request_id in (4001, 4002):
        source.close(request_id)
        assert not holders(source, request_id)


class Faulty(TokenSource):
    """Two tokens from a hash of the last two, with one fault."""

    def __init__(self, fault: str) -> None:
        self.vocab_size, self.fault = VOCAB, fault
        self.gives_probs = fault == "probs"
        self.last = 0

    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        found = Candidates.empty(len(nodes), k + (self.fault == "wide"))
        row = 0
        for request_id, ids in nodes.items:
            request = state.requests[request_id]
            for slot in request.tree.slots(ids).tolist():
                path = request.path_tokens(slot)
                if self.fault == "committed only":
                    path = request.tokens
                first = int(path[-2:].sum() * 7) % VOCAB
                if self.fault == "last call":
                    first, self.last = self.last, first
                second = first if self.fault == "twice" else (first + 1) % VOCAB
                num = min(k, 2)
                found.tokens[row, :num] = [first, second][:num]
                found.logprobs[row, :num] = 0.5 if self.fault == "above 0" else -0.7
                found.counts[row] = num
                row += 1
        if self.fault == "a row less":
            return found.take(np.arange(row - 1))
        if self.fault == "probs":
            found = replace(found, probs=np.full((row, VOCAB), 0.5))
        return found


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("none", ""),
        ("committed only", "depend on more than"),
        ("last call", "depend on more than"),
        ("twice", "must differ"),
        ("above 0", "at most 0"),
        ("wide", "more than k"),
        ("a row less", "must give"),
        ("probs", "sum to 1"),
    ],
)
def test_a_broken_rule_is_named(fault: str, message: str) -> None:
    expected = pytest.raises(AssertionError, match=message) if message else nullcontext()
    with expected:
        check_source(lambda: Faulty(fault), vocab_size=VOCAB)
