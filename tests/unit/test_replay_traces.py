"""Acceptance traces: chains of given lengths, and nothing else, are replayed from them."""

import gzip
import json

import numpy as np
import pytest
from replaying import run

from specdec.pairs.record import read_traces
from specdec.pairs.recorded import build_replay

# Not monotone, as drafts that read the target's hidden states make them: right for 1 token from
# position 1, but for 4 from position 2.
LENGTHS = {5: [1, 2, 5, 4, 1, 1, 3, 2, 1, 4, 2], 9: [3, 3, 1], 12: [1]}


def written(path, method: str | None = "acc_eagle"):
    lines = []
    for i, lengths in LENGTHS.items():
        found = {"acc_len": lengths} if method is None else {method: {"acc_len": lengths}}
        lines.append(json.dumps({"id": str(i), "prompt_token_ids": [1] * i, **found}))
    data = "\n".join(lines).encode() + b"\n"
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)


def walked(lengths: list[int], gamma: int) -> list[int]:
    """Tokens per pass, straight from the trace; the last pass is cut where the trace ends."""
    at, passes = 0, []
    while at < len(lengths):
        num = min(lengths[at], gamma + 1, len(lengths) - at)
        passes.append(num)
        at += num
    return passes


@pytest.mark.parametrize("gamma", [1, 3])
@pytest.mark.parametrize("stages", [None, 3])
def test_chains_emit_what_the_trace_says(tmp_path, gamma: int, stages: int | None) -> None:
    models = build_replay(record=written(tmp_path / "t.jsonl"), method="acc_eagle")
    words = ("strategy=speculative", f"policy.gamma={gamma}")
    if stages:
        words += ("executor=pipeline", f"executor.stages={stages}")
    results, _ = run(models, words, num_tokens=100)
    for result in results:
        expected = walked(LENGTHS[result.id], gamma)
        times = np.array(result.emitted_s)
        assert len(result.output) == len(LENGTHS[result.id])
        assert result.num_prompt == result.id
        assert np.unique(times, return_counts=True)[1].tolist() == expected
        counters = result.counters
        assert counters.answers == len(expected)
        assert counters.accepted + counters.answers - counters.cut_tokens == sum(expected)


def test_plain_decoding_and_gzip(tmp_path) -> None:
    models = build_replay(record=written(tmp_path / "t.jsonl.gz", None))
    results, totals = run(models, ("strategy=ar",), num_tokens=100)
    assert [len(r.output) for r in results] == [len(v) for v in LENGTHS.values()]
    assert totals.target_passes == sum(map(len, LENGTHS.values()))


@pytest.mark.parametrize("method", ["acc_eagle", "acc_ngram"])
def test_traces_of_real_systems_are_read(data_dir, method: str) -> None:
    """Llama-3.1-8B with EAGLE-3 and n-gram drafts on GSM8K (data/README.md)."""
    path = data_dir / "acceptance_traces" / "combined_gsm8k.jsonl.gz"
    requests = read_traces(path, method).requests
    assert len(requests) == 300
    lengths = [r.reach + 1 for r in requests if r.reach is not None]
    assert len(lengths) == 300
    mean = np.concatenate(lengths).mean()
    assert mean == pytest.approx({"acc_eagle": 3.07, "acc_ngram": 1.46}[method], abs=0.02)
