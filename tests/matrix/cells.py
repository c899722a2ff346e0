"""The composition matrix: every combination of the parts that the config tree offers.

Nothing is listed by hand: a new source, policy, verifier, executor or sampling YAML adds its cells.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any
from zlib import crc32

import numpy as np

from specdec.cli.composing import compose_config
from specdec.cli.tree import options
from specdec.pairs import ModelPair, RandomPair
from specdec.runners import PartsRunner, TokenPrompt
from specdec.state import StopRules

NUM_LAYERS = 4
NUM_STAGES = 3
MAX_NEW_TOKENS = 12
PROMPTS = (
    TokenPrompt(7, np.array([3], np.int64)),
    TokenPrompt(2, np.array([5, 1, 4, 1, 5, 9, 2, 6, 5], np.int64)),
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination, by option names."""

    source: str
    policy: str
    verifier: str
    executor: str
    sampling: str

    @property
    def in_fast_half(self) -> bool:
        """A fixed tenth of the cells, spread by name."""
        return crc32(repr(self).encode()) % 10 == 0


def cells(source: str, policy: str) -> Iterator[Cell]:
    """All cells of one source and policy.

    Executors that are the same on few stages count once; lossy verifiers, of which only the length
    is checked, run under two samplings.
    """
    for verifier in options("verifier"):
        for executor in executors():
            for sampling in options("sampling"):
                if verifier in ("match", "rejection") or sampling in ("greedy", "t06"):
                    yield Cell(source, policy, verifier, executor, sampling)


@cache
def executors() -> tuple[str, ...]:
    """Executor options that differ by more than their number of stages."""
    found: dict[str, str] = {}
    for name in options("executor"):
        found.setdefault(str(option("executor", name)["_target_"]), name)
    return tuple(found.values())


@cache
def option(group: str, name: str) -> dict[str, Any]:
    """The resolved node of one option."""
    return compose_config([f"{group}={name}"]).values[group]


@cache
def base() -> dict[str, Any]:
    """The resolved default configuration, made small."""
    values = compose_config(["model=random"]).values
    values.update(max_new_tokens=MAX_NEW_TOKENS, batch_size=2, seed=11, prefill_chunk=4)
    return values


@cache
def pair() -> ModelPair:
    """Tiny random models in float64."""
    return RandomPair(num_layers=NUM_LAYERS, vocab_size=32, max_positions=64)


def config(cell: Cell) -> dict[str, Any]:
    """The cell's resolved configuration, on a pipeline of few stages."""
    values = deepcopy(base())
    for group in ("source", "policy", "verifier", "executor", "sampling"):
        values[group] = deepcopy(option(group, getattr(cell, group)))
    if values["executor"].get("stages"):
        values["executor"]["stages"] = NUM_STAGES
    return values


def run(values: dict[str, Any]) -> tuple[dict[int, tuple[int, ...]], PartsRunner]:
    """Decodes the prompts; prompt id -> tokens, and the runner (closed)."""
    runner = PartsRunner(cfg=values, pair=pair(), stop=StopRules(max_new_tokens=MAX_NEW_TOKENS))
    outputs: dict[int, tuple[int, ...]] = {}
    runner.run(PROMPTS, lambda result: outputs.__setitem__(result.id, result.output))
    runner.close()
    return outputs, runner


@cache
def plain(sampling: str) -> dict[int, tuple[int, ...]]:
    """What plain autoregressive decoding gives, one prompt at a time."""
    values = config(Cell("none", "root_only", "match", "local", sampling))
    values["batch_size"] = 1
    return run(values)[0]
