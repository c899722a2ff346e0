"""``record=true`` and ``model=replay``: what is exact is tested exactly."""

import numpy as np
import pytest
from replaying import (
    NUM_TOKENS,
    PROMPTS,
    SAMPLINGS,
    composed,
    pair,
    recorded,
    replayed,
    run,
    shifted,
)

from specdec.clocks.meter import Meter
from specdec.pairs.record import read_record, record_request, write_record
from specdec.pairs.recorded import END, ReplayModels, build_replay
from specdec.runs.runners import sampling_params
from specdec.sources import DraftModelSource
from specdec.types import Answers, Nodes, Output, Verdict
from tests.states import new_request, new_state

pytestmark = pytest.mark.slow

# Of these the accepted path depends on the target's path only: what is off it is never preferred.
EXACT = {
    "chain": ("strategy=speculative", "policy.gamma=3"),
    "static": ("strategy=specinfer", "policy.branching=[2,3,1]"),
    "pipelined chain": ("strategy=specpipe", "executor.stages=3", "policy.width=1"),
}


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", EXACT)
def test_paths_are_replayed_exactly(name: str, sampling: str) -> None:
    """Every raw count of every request, and the draft's own work; a rank off by one breaks it."""
    words = (*EXACT[name], *SAMPLINGS[sampling])
    real, real_totals = run(pair(), words)
    again, totals = run(replayed(recorded(sampling)), words)
    assert [r.counters for r in again] == [r.counters for r in real]
    assert [len(r.output) for r in again] == [len(r.output) for r in real]
    assert sum(r.counters.accepted + r.counters.hits for r in real) > 3, "nothing was accepted"
    for key in ("steps", "target_passes", "target_rows", "draft_passes", "draft_rows"):
        assert getattr(totals, key) == getattr(real_totals, key), key
    broken, _ = run(replayed(shifted(recorded(sampling))), words)
    assert [r.counters for r in broken] != [r.counters for r in real]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_an_entry_is_what_expand_would_answer(sampling: str) -> None:
    """The record's pass over the whole output against the source's own, node by node."""
    cfg = composed(("strategy=speculative", *SAMPLINGS[sampling]))
    (prompt, _), (entry, _) = PROMPTS, recorded(sampling).requests
    results, _ = run(pair(), ("strategy=ar", *SAMPLINGS[sampling]))
    request = new_request(prompt.id, prompt.tokens, NUM_TOKENS, sampling_params(cfg["sampling"]))
    state = new_state(request)
    source = DraftModelSource(runner=pair().runner("draft", Meter()))
    source.open(request)
    for i, token in enumerate(results[0].output):
        got = source.expand(state, Nodes(((request.id, request.tree.ids[:1]),)), 32)
        count = int(got.counts[0])
        line = entry.logprobs[i]
        assert np.isfinite(line).sum() == count
        expected = got.logprobs[0, :count].astype(np.float16)
        assert np.allclose(line[:count], expected, rtol=2e-3, atol=1e-6)  # float16 has 11 bits
        found = np.flatnonzero(got.tokens[0, :count] == token)
        assert entry.ranks[i] == found[0] if len(found) else entry.ranks[i] >= count
        none = np.zeros(0, np.int64)
        answers = Answers(
            request=request.id, node_ids=request.tree.ids[:1].copy(), tokens=np.array([token])
        )
        state.receive(Output(step=i, answers=(answers,)))
        verdict = Verdict(request=request.id, accepted_ids=none, next_token=token)
        source.commit(state.commit([verdict]), Output(step=i))


def test_a_draft_with_fewer_positions_is_recorded_as_silent_beyond_them() -> None:
    runner = pair().runner("draft", Meter())
    runner.max_positions = 10
    params = sampling_params(composed(())["sampling"])
    text = {"prompt": np.arange(1, 6), "output": np.arange(1, 21)}
    entry = record_request(runner, params, request_id=1, **text)
    assert (entry.ranks[:6] < 256).all()  # nodes at positions 4 .. 9
    assert (entry.ranks[6:] == 256).all()
    assert np.isneginf(entry.logprobs[6:]).all()


def test_long_requests_are_recorded_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    params = sampling_params(composed(())["sampling"])
    tokens = np.random.default_rng(0).integers(1, 64, 40)
    runner = pair().runner("draft", Meter())
    text = {"prompt": tokens[:20], "output": tokens[20:]}
    whole = record_request(runner, params, request_id=1, **text)
    monkeypatch.setattr("specdec.pairs.record._CHUNK", 7)
    parts = record_request(runner, params, request_id=1, **text)
    assert (parts.ranks == whole.ranks).all()
    assert np.allclose(parts.logprobs, whole.logprobs, rtol=2e-3)


POLICIES = (
    ("strategy=specpipe", "executor.stages=8", "policy.width=8"),
    ("strategy=best_first", "policy.bs=8"),
)


@pytest.mark.parametrize("words", POLICIES, ids=" ".join)
def test_every_strategy_decodes_the_recorded_prompts(words: tuple[str, ...]) -> None:
    """The same tokens as plain decoding, to the end of the record, by any tree on any cluster."""
    models = replayed(recorded("sampled"))
    long = 4 * NUM_TOKENS
    plain, _ = run(models, ("strategy=ar",), num_tokens=long)
    results, totals = run(models, words, num_tokens=long)
    assert [r.output for r in results] == [r.output for r in plain]
    lengths = {r.id: (r.num_prompt, r.num_output) for r in recorded("sampled").requests}
    assert {r.id: (r.num_prompt, len(r.output)) for r in results} == lengths
    assert all(r.finish_reason == "eos" and r.output[-1] == END for r in results)
    twice, again = run(models, words, num_tokens=long)
    assert [r.counters for r in twice] == [r.counters for r in results]
    assert again.steps == totals.steps


def test_beyond_the_end_of_the_record_positions_are_drawn_from_it() -> None:
    models = replayed(recorded("greedy"))
    hidden, request = models.hidden, recorded("greedy").requests[0]
    end = request.num_prompt + request.num_output
    inside = np.arange(request.num_prompt - 1, end - 1)
    assert (hidden.ranks(request.id, inside) == request.ranks).all()
    beyond = hidden.classes(request.id, np.arange(end - 1, end + 500))
    assert set(beyond.tolist()) == set(hidden.classes(request.id, inside).tolist())


def test_records_are_written_and_read_without_loss(tmp_path) -> None:
    record = recorded("no_repeat4")
    found = read_record(write_record(tmp_path / "record.npz", record))
    assert found.vocab_size == record.vocab_size
    assert found.weight_bytes == record.weight_bytes
    assert dict(found.about) == dict(record.about)
    for a, b in zip(found.requests, record.requests, strict=True):
        assert (a.id, a.num_prompt) == (b.id, b.num_prompt)
        assert (a.ranks == b.ranks).all()
        assert np.array_equal(a.logprobs, b.logprobs)


def test_the_shipped_record_plays() -> None:
    """Nothing about its figures: the family that it was made with is trained again now and then."""
    models = build_replay(record="bundled:humaneval")
    assert isinstance(models, ReplayModels)
    prompts = models.prompts()
    assert len(prompts) >= 8
    assert models.conditions()["data"] == "humaneval"
    assert all(models.weight_bytes.values())
    results, _ = run(models, ("strategy=speculative",), num_tokens=16)
    assert len(results) == len(prompts)
