"""Host time of sampling from a large vocabulary: ``python -m experiments.benchmarks.sampling``.

Prints milliseconds of one thread's CPU time per call (the least of some repeats), for rows of
float32 logits of three kinds: ``language`` (few probable tokens, as a trained model's), and normal
logits with standard deviation 3 and 1 (as a random model's, of which top-p keeps thousands).
"""

from __future__ import annotations

import argparse
import timeit
from collections.abc import Callable, Mapping
from time import thread_time

import numpy as np
import pandas as pd
import torch

from specdec.sampling.transform import SamplingParams, SamplingTransform

SAMPLINGS: Mapping[str, SamplingParams] = {
    "greedy": SamplingParams(),
    "t06": SamplingParams(temperature=0.6, top_k=80, top_p=0.9),
    "top_p": SamplingParams(temperature=0.8, top_p=0.95),
    "temperature": SamplingParams(temperature=1.0),
}


def rows_of(kind: str, rows: int, vocab_size: int) -> torch.Tensor:
    """float32[rows, vocab_size] logits."""
    rng = np.random.default_rng(0)
    normal = rng.standard_normal((rows, vocab_size))
    if kind == "language":  # Zipf's law, with a different exponent per row
        exponents = rng.uniform(1.2, 3.0, (rows, 1))
        logits = 18.0 - exponents * np.log(np.arange(1, vocab_size + 1)) + 0.3 * normal
        logits = rng.permuted(logits, axis=1)
    else:
        logits = {"normal_3": 3.0, "normal_1": 1.0}[kind] * normal
    return torch.from_numpy(logits.astype(np.float32))


def operations(logits: torch.Tensor) -> dict[str, Callable[[], object]]:
    uniforms = np.random.default_rng(1).random(len(logits))
    calls: dict[str, Callable[[], object]] = {}
    for name, params in SAMPLINGS.items():
        transform = SamplingTransform(params)
        calls[name] = lambda transform=transform: transform.sample(logits, uniforms)
    draft, filtered = (SamplingTransform(SAMPLINGS[name]) for name in ("greedy", "t06"))
    calls["top_16"] = lambda: draft.top(logits, 16)
    calls["t06_distributions"] = lambda: filtered.distribution(logits)
    return calls


def least_ms(call: Callable[[], object], repeats: int) -> float:
    """Least milliseconds of CPU time of this thread."""
    return min(timeit.repeat(call, timer=thread_time, number=1, repeat=repeats)) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocab-size", type=int, default=128_256)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    table = {}
    for kind in ("language", "normal_3", "normal_1"):
        calls = operations(rows_of(kind, args.rows, args.vocab_size))
        table[kind] = {name: least_ms(call, args.repeats) for name, call in calls.items()}
    print(pd.DataFrame(table).to_string(float_format="%.2f"))


if __name__ == "__main__":
    main()
