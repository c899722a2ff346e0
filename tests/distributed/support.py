"""Configurations and runs of the distributed tests: tiny random models in float64."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import fields
from functools import cache
from typing import Any

import numpy as np

from specdec.config.hydra import compose_config
from specdec.metrics import RequestResult, RunTotals
from specdec.pairs import ModelPair, build_pair
from specdec.runs.runners import PartsRunner, TokenPrompt
from specdec.state import StopRules

STRATEGIES = ("ar", "specinfer", "pipedec", "specpipe", "best_first")
MAX_NEW_TOKENS = 7
PROMPTS = (
    TokenPrompt(7, np.array([3], np.int64)),  # no prefill
    TokenPrompt(2, np.array([5, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], np.int64)),  # three prefill chunks
    TokenPrompt(4, np.array([8, 9], np.int64)),
)


@cache
def pair() -> ModelPair:
    return _pair(json.dumps(config("ar", 2)["model"]))


@cache
def _pair(model: str) -> ModelPair:
    return build_pair(json.loads(model))


@cache
def _composed(strategy: str, sampling: str) -> dict[str, Any]:
    return compose_config(
        [
            f"strategy={strategy}",
            f"sampling={sampling}",
            "executor=pipeline",
            "model=random",
            "model.num_layers=8",
            "model.hidden_size=32",
            "model.vocab_size=32",
            "model.max_positions=64",
            "prefill_chunk=4",
            "seed=11",
            "threads=1",
        ]
    ).values


def config(
    strategy: str, stages: int, sampling: str = "greedy", *, distributed: bool = False, **keys: Any
) -> dict[str, Any]:
    """A resolved configuration; ``keys`` are dotted, with __ for the dot."""
    values = deepcopy(_composed(strategy, sampling))
    values["executor"]["stages"] = stages
    values["executor"]["transport"] = "distributed" if distributed else "in_process"
    if values["policy"].get("width", 1) > 1:
        values["policy"].update(width=5, children=3)
    for key, value in keys.items():
        *path, last = key.split("__")
        node = values
        for name in path:
            node = node[name]
        node[last] = value
    return values


@contextmanager
def runner(values: dict[str, Any], max_new_tokens: int = MAX_NEW_TOKENS) -> Iterator[PartsRunner]:
    stop = StopRules(max_new_tokens=max_new_tokens)
    parts_runner = PartsRunner(cfg=values, pair=_pair(json.dumps(values["model"])), stop=stop)
    try:
        yield parts_runner
    finally:
        parts_runner.close()


def run(values: dict[str, Any]) -> tuple[dict[int, RequestResult], RunTotals]:
    """Decodes the prompts; results by prompt, and totals."""
    results: dict[int, RequestResult] = {}
    with runner(values) as parts_runner:
        totals = parts_runner.run(PROMPTS, lambda result: results.__setitem__(result.id, result))
    return results, totals


def rejection() -> dict[str, Any]:
    """Configuration of a verifier that needs target distributions."""
    return {"_target_": "specdec.verifiers.RejectionVerifier"}


def counted(result: RequestResult) -> dict[str, Any]:
    """All fields of a result except times."""
    values = {f.name: getattr(result, f.name) for f in fields(result)}
    return {k: v for k, v in values.items() if not k.endswith("_s")}


def same(values: dict[str, Any]) -> None:
    """Runs a configuration on both transports and compares results and counts."""
    values["executor"]["transport"] = "in_process"
    expected, expected_totals = run(values)
    values["executor"]["transport"] = "distributed"
    results, totals = run(values)
    assert set(results) == {prompt.id for prompt in PROMPTS}
    for key, result in expected.items():
        assert counted(results[key]) == counted(result)
        assert len(result.output) == MAX_NEW_TOKENS
    assert totals.steps == expected_totals.steps
    assert totals.target_rows == expected_totals.target_rows
