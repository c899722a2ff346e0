"""Executors: latency, pruning in flight, and the cache invariant of every stage."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specdec.certify.invariants import observation
from specdec.certify.subject import Subject
from specdec.executors import LocalExecutor, PipelineExecutor
from specdec.executors.replicas import ReplicasExecutor
from specdec.executors.stage import split_layers
from specdec.interfaces import Executor
from specdec.testing import check_executor
from specdec.types import Commit, Output
from tests.matrix.cells import Cell, config


def test_layers_are_split_evenly_and_all_used() -> None:
    assert split_layers(80, 8) == [(10 * i, 10 * i + 10) for i in range(8)]
    assert split_layers(5, 3) == [(0, 2), (2, 4), (4, 5)]
    with pytest.raises(ValueError, match=r"executor\.stages=6"):
        split_layers(5, 6)


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "executor"), [("specpipe", "pipeline"), ("chain", "local")])
def test_every_cache_equals_a_fresh_forward_after_every_step(policy: str, executor: str) -> None:
    """Prefix as far as ``cached_len``, each tree entry over its path; draft included."""
    values = config(Cell("draft_model", policy, "match", executor, "t06"))
    if policy == "specpipe":
        values["policy"].update(width=5, children=3)
    seen = observation(Subject(values))
    assert [*seen.caches, *seen.trees, seen.error] == [None]
    assert seen.num_entries > 200, "the check must have had entries to look at"


class Faulty(LocalExecutor):
    """The target in this process, with the fault that the subclass names."""

    fault = ""

    def collect(self, *, wait: bool = True) -> Output:
        output = super().collect(wait=wait)
        changed = []
        for answers in output.answers:
            ids, tokens = answers.node_ids, answers.tokens
            if self.fault == "other tokens":
                tokens = np.where(tokens < 0, tokens, (tokens + 1) % 48)
            elif self.fault == "a row less":
                ids, tokens = ids[:-1], tokens[:-1]
            elif self.fault == "strangers":
                ids = ids + 1000
            changed.append(replace(answers, node_ids=ids, tokens=tokens))
        return replace(output, answers=tuple(changed))

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        if self.fault == "nothing accepted":
            commits = [replace(c, retired_ids=c.retired_ids[:1]) for c in commits]
        super().commit(commits, output)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("executor", "keys"),
    [(LocalExecutor, {}), (PipelineExecutor, {"stages": 3}), (ReplicasExecutor, {"replicas": 2})],
)
def test_executors_keep_their_contract(executor: type[Executor], keys: dict[str, Any]) -> None:
    assert check_executor(executor, **keys) >= 12


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("other tokens", "not plain decoding"),
        ("a row less", "no answers of"),
        ("strangers", "not due"),
        ("nothing accepted", None),
    ],
)
def test_a_broken_rule_is_named(fault: str, message: str | None) -> None:
    executor = type("Named", (Faulty,), {"fault": fault})
    with pytest.raises((AssertionError, ValueError), match=message):
        check_executor(executor)
