"""What every source owes the loop, whatever it proposes from.

An expansion depends on the tokens up to the node alone: over random trees, orders of expansion and
commits, several requests at once, it equals that of a new source whose prompt ends with the node.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from specdec.device import on_host
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
from strategies.staged import StagedSource

from .support import (
    VOCAB,
    expand,
    expansions,
    make_onnx_runner,
    make_request,
    make_runner,
    make_state,
    open_request,
    tiny_model,
)

MODEL = tiny_model()
KATZ = KatzModel.from_tokens(
    np.random.default_rng(0).integers(0, VOCAB, 900), order=3, vocab_size=VOCAB, separator=0
)
TEMPERATE = SamplingParams(temperature=0.7, top_k=10, top_p=0.9)
NO_REPEAT = SamplingParams(temperature=0.7, no_repeat_ngram=2)
REQUESTS = (4001, 4002)


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


def check_expansions(make: Callable[[], TokenSource], sampling: SamplingParams, atol: float) -> int:
    """Compares random expansions with those of new sources; returns their number."""
    rng = np.random.default_rng(0)
    source, state, compared = make(), make_state(seed=3), 0
    for request_id in REQUESTS:
        prompt = rng.integers(0, VOCAB, rng.integers(1, 40))
        open_request(state, source, make_request(request_id, prompt, sampling=sampling))
    for wanted, k, found in expansions(state, source, rng):
        nodes = [(r, slot) for r, slots in wanted.items() for slot in slots]
        for row, (request_id, slot) in enumerate(nodes):
            alone, fresh = make(), make_state(seed=3)
            path = state.requests[request_id].path_tokens(slot)
            open_request(fresh, alone, make_request(request_id, path, sampling=sampling))
            expected = expand(fresh, alone, {request_id: [0]}, k)
            num = int(expected.counts[0])
            assert found.counts[row] == num
            assert found.tokens[row, :num].tolist() == expected.tokens[0, :num].tolist()
            np.testing.assert_allclose(
                found.logprobs[row, :num], expected.logprobs[0, :num], atol=atol
            )
            assert (found.probs is None) == (expected.probs is None) == (not source.gives_probs)
            if expected.probs is not None:
                np.testing.assert_allclose(
                    on_host(found.probs)[row], on_host(expected.probs)[0], atol=atol
                )
            compared += 1
    return compared


@pytest.mark.parametrize("name", PATH_SOURCES)
@pytest.mark.parametrize("sampling", [TEMPERATE, NO_REPEAT])
def test_candidates_depend_on_the_tokens_up_to_the_node(
    name: str, sampling: SamplingParams
) -> None:
    assert check_expansions(PATH_SOURCES[name], sampling, 1e-10) > 20


@pytest.mark.parametrize("sample", [False, True])
def test_the_same_in_onnx_runtime(sample: bool) -> None:
    pytest.importorskip("onnxruntime", reason="pip install specdec-lab[onnx]")
    runner = make_onnx_runner()
    assert check_expansions(lambda: DraftModelSource(runner=runner, sample=sample), TEMPERATE, 1e-5)


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
    assert isinstance(source, TokenSource)
    for request_id in REQUESTS:
        prompt = rng.integers(0, VOCAB, 12)
        open_request(state, source, make_request(request_id, prompt, sampling=TEMPERATE))
    for wanted, k, found in expansions(state, source, rng):
        num = sum(map(len, wanted.values()))
        assert found.tokens.shape == found.logprobs.shape
        assert len(found.tokens) == len(found.counts) == num
        assert found.tokens.shape[1] <= k
        assert found.tokens.dtype == found.counts.dtype == np.int64
        for tokens, logprobs, count in zip(
            found.tokens, found.logprobs, found.counts.tolist(), strict=True
        ):
            assert len({*tokens[:count].tolist()}) == count <= k
            assert (logprobs[:count] <= 0).all()
    assert source.counters.passes == sum(source.counters.by_level.values())
    assert holders(source, REQUESTS[0]) or name.startswith(("n-gram", "random", "nothing"))
    source.close(REQUESTS[0])
    assert not holders(source, REQUESTS[0])
    expand(state, source, {REQUESTS[1]: [0]}, 2)  # the other goes on
    source.close(REQUESTS[1])
    source.close(REQUESTS[1])
    assert not holders(source, REQUESTS[1])
