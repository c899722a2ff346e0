"""Laws fitted to the published acceptance logs under SPECDEC_DATA predict what was held out."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import numpy as np
import pytest

from specdec.fitting import RankVector, ReadOptions, fit_logs, read_log, tail_of
from specdec.fitting.tails import fit_tails

TRACES = Path(os.environ.get("SPECDEC_DATA", "")) / "acceptance_traces"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not os.environ.get("SPECDEC_DATA") or not TRACES.is_dir(),
        reason="SPECDEC_DATA names no folder with acceptance_traces",
    ),
]

PAIR = "pipespec/chain_Llama-3.2-1B-Instruct-Llama-3.1-8B-Instruct_{}.json.gz"
OTHER_LENGTHS = (2, 4, 5, 7, 9, 10, 11, 13, 14, 15, 16, 17, 19, 20)

HELD_OUT = {
    "1B -> 70B": ("pipespec/chain_Llama-3.2-1B-Instruct-Meta-Llama-3.1-70B-Instruct_8.json.gz", {}),
    "68M -> Vicuna-7B": (
        "specbench_bnukhkadiev/vicuna-7b-v1.3-sps-68m-float16-temp-0.0.jsonl.gz",
        {},
    ),
    "EAGLE-1": ("specbench_yukiki/vicuna-7b-v1.3-eagle-float16-temperature-0.0.jsonl.gz", {}),
    "Medusa": (
        "specbench_bnukhkadiev/mt_bench_vicuna-7b-v1.3-medusa-float16-temperature-0.0.jsonl.gz",
        {},
    ),
    "EAGLE-3 on Qwen3-14B": ("ltd_eagle3/qwen3_14b_eagle3_gsm8k.jsonl.gz", {}),
    "EAGLE-3 on Qwen3-8B": ("ltd_eagle3/qwen3_8b_eagle3_gsm8k.jsonl.gz", {}),
    "EAGLE-3 on Llama-3.1-8B": (
        "combined_gsm8k.jsonl.gz",
        {"method": "acc_eagle", "draft_tokens": 7},
    ),
}
LARGE = {
    "68M -> Vicuna-7B",
    "EAGLE-1",
    "EAGLE-3 on Qwen3-14B",
    "EAGLE-3 on Llama-3.1-8B",
}  # 15 s each; the suite has others
PAIRS = [
    pytest.param(pair, marks=pytest.mark.exhaustive if pair in LARGE else ()) for pair in HELD_OUT
]
TREES = {"EAGLE-1", "Medusa", "EAGLE-3 on Qwen3-14B", "EAGLE-3 on Qwen3-8B"}


def test_chains_of_length_8_predict_lengths_2_to_20() -> None:
    """Within 3 % at every measured length, a pass of k rows having k - 1 draft tokens."""
    checks = [read_log(TRACES / PAIR.format(k)) for k in OTHER_LENGTHS]
    fitted = fit_logs([read_log(TRACES / PAIR.format(8))], checks=checks)
    errors = {k: c.error for k, c in zip(OTHER_LENGTHS, fitted.checks, strict=True)}
    assert max(map(abs, errors.values())) < 0.03, errors


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("gsm8k", "acc_eagle"),
        ("gsm8k", "acc_ngram"),
        pytest.param("instructcoder", "acc_eagle", marks=pytest.mark.exhaustive),
        pytest.param("instructcoder", "acc_ngram", marks=pytest.mark.exhaustive),
        pytest.param("cnn", "acc_eagle", marks=pytest.mark.exhaustive),
        pytest.param("cnn", "acc_ngram", marks=pytest.mark.exhaustive),
    ],
)
def test_short_chains_of_a_trace_predict_others(name: str, method: str) -> None:
    """EAGLE-3 and n-gram drafts: chains of 7 predict 1 to 15 draft tokens within 3 %."""
    path = TRACES / f"combined_{name}.jsonl.gz"
    counts = (1, 2, 3, 5, 9, 11, 15)
    logs = [read_log(path, ReadOptions(method=method, draft_tokens=k)) for k in (7, *counts)]
    fitted = fit_logs(logs[:1], checks=logs[1:])
    errors = {k: c.error for k, c in zip(counts, fitted.checks, strict=True)}
    assert max(map(abs, errors.values())) < 0.03, errors


@pytest.mark.parametrize("pair", PAIRS)
def test_held_out_prompts(pair: str) -> None:
    """Within 5 %, or inside the 95 % interval."""
    path, options = HELD_OUT[pair]
    log = read_log(TRACES / path, ReadOptions(**options))  # type: ignore[arg-type]
    good = fit_logs([log], covers_tree=pair in TREES).goodness
    assert good is not None
    assert abs(good.check.error) < 0.05 or good.check.is_inside


def test_tails_are_those_of_the_rank_vectors() -> None:
    """The constants of ``tail_of`` come from the 16 vectors, and describe each within 4 ranks."""
    with (TRACES / "extracted" / "rank_vectors.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    vectors = [
        RankVector(
            name=row["file"],
            shares=np.array([float(row[f"r{r}"] or 0) for r in range(1, 33)]),
            miss=float(row["miss"]),
        )
        for row in rows
    ]
    (decay, slope), (miss, fall) = fit_tails(vectors)
    for rate in (0.5, 0.7, 0.9):
        odds = np.log(rate / (1 - rate))
        tail = tail_of(rate)
        assert tail.decay == pytest.approx(decay + slope * odds, abs=0.01)
        assert tail.miss == pytest.approx(1 / (1 + np.exp(-(miss + fall * odds))), abs=0.01)
    for vector in vectors:
        rate = float(vector.shares[0])
        within4 = rate + (1 - rate) * tail_of(rate).shares()[:3].sum()
        assert within4 == pytest.approx(vector.shares[:4].sum(), abs=0.035), vector.name
