"""``specdec verify`` finds faults of asynchronous parts.

Answers in any order, drafts that run free, hidden states that arrive early: no preset has such
parts, so they are composed in Python.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest

from specdec.certify import CHECKS, Report
from specdec.certify.certify import certify
from specdec.compose.planned import planned
from specdec.compose.workbench import Parts, Workbench
from specdec.config.hydra import compose_config
from specdec.executors import PipelineExecutor
from specdec.pairs import ModelPair
from specdec.policies import FixedWidth
from specdec.sources import DraftModelSource
from specdec.sources.background import Background
from specdec.types import HiddenName
from specdec.verifiers import MatchVerifier
from tests import toys
from tests.toys import EarlyLens, FreeRunning, LevelWhenKnown, Replicas

SMALL = (
    "model=random",
    "model.hidden_size=32",
    "model.num_layers=4",
    "model.draft_layers=3",
    "model.vocab_size=32",
    "model.max_positions=256",
)
"""Overrides that make a run short: tiny float64 models."""


@dataclass(slots=True)
class Planted:
    """A planted bug.

    Attributes:
        fired: number of calls in which the planted code differed from the shipped code.
    """

    fired: int = 0
    _stack: ExitStack = field(default_factory=ExitStack)

    def swap(self, place: str, make: Callable[[Any], Any]) -> None:
        """Replaces ``module:Class.name`` or ``module:name`` by ``make(original)``."""
        module, _, path = place.partition(":")
        owner: Any = importlib.import_module(module)
        *outer, name = path.split(".")
        for part in outer:
            owner = getattr(owner, part)
        original = vars(owner)[name]
        setattr(owner, name, make(original))
        self._stack.callback(setattr, owner, name, original)

    def restore(self) -> None:
        self._stack.close()


QUICK = ("greedy_parity", "cache_invariant", "tree_invariant", "draft_rows")
"""Checks that find all of these faults; ``test_the_sound_toys_certify`` runs every check."""


def _bench(cfg: Mapping[str, Any], pair: Any, *, is_simulated: bool = True) -> Workbench:
    clock = toys.simulated(10.0, 3.0) if is_simulated else None
    return Workbench(pair, seed=int(cfg["seed"]), clock=clock)


def replicas(cfg: Mapping[str, Any], pair: ModelPair) -> Parts:
    """Levels on two copies of the target that answer in any order."""
    bench = _bench(cfg, pair)
    return bench.parts(
        source=DraftModelSource(runner=bench.draft_runner()),
        policy=FixedWidth(width=4, children=3),
        verifier=MatchVerifier(),
        executor=planned(Replicas, pair, replicas=2, delay_ms=20.0),
    )


def free(cfg: Mapping[str, Any], pair: ModelPair, *, is_simulated: bool = True) -> Parts:
    """A draft that runs free beside a pipeline."""
    bench = _bench(cfg, pair, is_simulated=is_simulated)
    return bench.parts(
        source=Background(source=DraftModelSource(runner=bench.draft_runner()), free_rank=4),
        policy=FreeRunning(),
        verifier=MatchVerifier(),
        executor=planned(PipelineExecutor, pair, stages=3),
    )


def threaded(cfg: Mapping[str, Any], pair: ModelPair) -> Parts:
    """The same with passes in a thread."""
    return free(cfg, pair, is_simulated=False)


def early(cfg: Mapping[str, Any], pair: ModelPair) -> Parts:
    """Proposals from the hidden states of a middle layer."""
    bench = _bench(cfg, pair)
    return bench.parts(
        source=EarlyLens(pair, name=HiddenName(1)),  # type: ignore[arg-type]
        policy=LevelWhenKnown(width=3, children=3),
        verifier=MatchVerifier(),
        executor=planned(PipelineExecutor, pair, stages=3),
    )


BUILDS = {build.__name__: build for build in (replicas, free, threaded, early)}
# tests/unit/test_free_running.py and test_out_of_order.py decode with the sound ones.
ON_DEMAND = {"free", "replicas", "threaded"}


@cache
def _config() -> dict[str, Any]:
    return compose_config(["strategy=speculative", *SMALL]).values


def certified(build: Callable[..., Parts], checks: tuple[str, ...] | None = QUICK) -> Report:
    return certify(_config(), build=build, checks=checks)


# Faults.


def answer_of_a_pruned_node(work: Planted) -> None:
    """Answers of pruned nodes are stored in the slots where their ids would have been."""

    def make(original: Any) -> Any:
        def set_answers(self: Any, answers: Any) -> None:
            original(self, answers)
            gone = self.slots(answers.node_ids) < 0
            if gone.any():
                work.fired += 1
                at = self.ids.searchsorted(answers.node_ids[gone]).clip(max=len(self) - 1)
                self.answers[at], self.answered[at] = answers.tokens[gone], True

        return set_answers

    work.swap("specdec.tree:TokenTree.set_answers", make)


def answer_taken_as_the_roots(work: Planted) -> None:
    """An answer that arrives before the root's is taken as the root's."""

    def make(original: Any) -> Any:
        def set_answers(self: Any, answers: Any) -> None:
            original(self, answers)
            if not self.answered[0] and (self.slots(answers.node_ids) > 0).any():
                work.fired += 1
                self.answers[0], self.answered[0] = answers.tokens[0], True

        return set_answers

    work.swap("specdec.tree:TokenTree.set_answers", make)


def rollback_missed_by_a_copy(work: Planted) -> None:
    """A copy ignores every third commit."""

    def make(original: Any) -> Any:
        def commit(self: Any, commits: Any) -> None:
            self.num_commits = getattr(self, "num_commits", 0) + 1
            if commits and self.num_commits % 3 == 0:
                work.fired += 1
                return
            original(self, commits)

        return commit

    work.swap("replicas:_Copy.commit", make)


def deferred_commit_dropped(work: Planted) -> None:
    """Commits that arrive during a pass are forgotten."""

    def make(original: Any) -> Any:
        def commit(self: Any, commits: Any, output: Any) -> None:
            if self._last is not None and not self._last.done():
                work.fired += bool(commits)
                return
            original(self, commits, output)

        return commit

    work.swap("specdec.sources.background:Background.commit", make)


def stale_candidates(work: Planted) -> None:
    """Candidates of a pruned node are stored in the slot where its id would have been."""

    def make(original: Any) -> Any:
        def set_candidates(self: Any, nodes: Any, candidates: Any) -> None:
            original(self, nodes, candidates)
            for request_id, ids, rows in nodes.packed():
                if (request := self.requests.get(request_id)) is None:
                    continue
                tree = request.tree
                gone = tree.slots(ids) < 0
                if gone.any():
                    work.fired += 1
                    at = tree.ids.searchsorted(ids[gone]).clip(max=len(tree) - 1)
                    part = candidates.take(rows.start + np.flatnonzero(gone))
                    tree.set_candidates(at, part, slice(None))

        return set_candidates

    work.swap("specdec.state:DecodeState.set_candidates", make)


def states_of_another_node(work: Planted) -> None:
    """The hidden states of a batch's rows are exchanged, over all of its requests."""

    def make(original: Any) -> Any:
        def by_item(batch: Any, captured: Any) -> Any:
            work.fired += batch.num_tokens > 1
            return original(batch, {name: rows.roll(1, 0) for name, rows in captured.items()})

        return by_item

    work.swap("specdec.executors.stage:_by_item", make)


FAULTS: dict[Callable[[Planted], None], str] = {
    answer_of_a_pruned_node: "replicas",
    answer_taken_as_the_roots: "replicas",
    rollback_missed_by_a_copy: "replicas",
    deferred_commit_dropped: "threaded",
    stale_candidates: "free",
    states_of_another_node: "early",
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_every_fault_is_found(fault: Callable[[Planted], None]) -> None:
    work = Planted()
    fault(work)
    try:
        report = certified(BUILDS[FAULTS[fault]])
    finally:
        work.restore()
    assert work.fired, "the planted code had no effect"
    assert not report.lossless
    assert report.failed, report.as_dict()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.exhaustive if name in ON_DEMAND else ())
        for name in BUILDS
    ],
)
def test_the_sound_toys_certify(name: str) -> None:
    """Without a fault every check passes; otherwise finding faults proves nothing."""
    report = certified(BUILDS[name], checks=None)
    assert report.lossless, report.as_dict()
    assert len(report.checks) == len(CHECKS)
