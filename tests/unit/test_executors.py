"""Executors: caches, their contract, times of steps, and what ended requests leave behind."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specdec.certify.invariants import observation
from specdec.certify.subject import Subject
from specdec.clocks import (
    CostCurve,
    LatencyProfile,
    MeasuredClock,
    PacedClock,
    SimulatedClock,
    Timeline,
    Work,
)
from specdec.compose.workbench import Workbench, build, planned
from specdec.errors import UserError
from specdec.executors import LocalExecutor, PipelineExecutor
from specdec.executors.models import deliverable
from specdec.executors.replicas import ReplicasExecutor
from specdec.executors.stage import Answerer, PipelineStage, Stage, split_layers
from specdec.interfaces import Executor
from specdec.pairs.random import build_random
from specdec.policies import RootOnly
from specdec.sampling.transform import SamplingParams
from specdec.sources import NullSource
from specdec.testing import check_executor, decode_cases
from specdec.types import Answers, Batch, Commit, HiddenName, Needs, Output, TreeRows
from specdec.verifiers import MatchVerifier
from tests import toys
from tests.matrix.cells import Cell, config
from tests.reachable import reachable
from tests.states import new_commit, new_request


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


@pytest.mark.parametrize(
    ("executor", "keys"),
    [
        pytest.param(LocalExecutor, {}, marks=pytest.mark.slow),
        pytest.param(PipelineExecutor, {"stages": 3}, marks=pytest.mark.slow),
        (ReplicasExecutor, {"replicas": 2}),
    ],
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


def test_stages_deliver_the_states_between_their_layers_and_the_last_norm() -> None:
    names = tuple(HiddenName(i, normed) for i in range(-1, 5) for normed in (False, True))
    given = tuple(map(HiddenName, range(4))) + (HiddenName(3, normed=True),)
    found = deliverable(Needs(hidden=names, early_hidden=names), 4)
    assert found == Needs(hidden=given, early_hidden=given)
    assert deliverable(Needs(hidden=names), 4, exits=True) == Needs()


class _Echo(Answerer):
    def answer(self, batch: Batch, logits: object) -> tuple[Answers, ...]:
        return tuple(Answers(request=1, node_ids=t.node_ids, tokens=t.tokens) for t in batch.trees)


def test_a_step_takes_its_slowest_stage_and_then_its_slowest_transfer() -> None:
    """SpecPipe, Algorithm 1: compute, prune, send. The devices of a stage work one after another
    (PipeDec 3.1); the last one has the head, and sends answers.
    """
    prices = {"stage": 9.0, "head": 4.0, "prune": 2.0, "transfer": 1.0}
    curves = {k: CostCurve(tokens=(1, 11), ms=(ms, 5 * ms)) for k, ms in prices.items()}
    profile = LatencyProfile(name="test", costs=curves)
    rng, clock, devices = np.random.default_rng(0), SimulatedClock(profile), np.array([2, 1, 3])
    stages = [PipelineStage(Stage(), answerer=last) for last in (None, None, _Echo())]
    executor = PipelineExecutor(stages=stages, clock=clock, devices=devices.tolist())
    executor.open(new_request(1))
    on: list[list[int]] = [[], [], []]  # nodes that are on each stage
    now, next_id, busy = 0.0, 0, np.zeros(3)

    def cost(kind: Work, *sizes: int) -> np.ndarray:
        return np.array([profile.ms(kind, size) for size in sizes]) / 1e3

    for step in range(40):
        ids = np.arange(next_id, next_id := next_id + int(rng.integers(0, 5)))
        on = [ids.tolist(), *on[:2]]
        rows = {"node_ids": ids, "tokens": ids, "parent_ids": np.full(len(ids), -1)}
        tree = TreeRows.within(request=1, prefix_len=5, **rows)
        executor.submit(Batch(step=step, trees=(tree,) if len(ids) else ()))
        sizes = [*map(len, on)]
        passes = devices * cost(Work.STAGE, *sizes) + (devices - 1) * cost(Work.TRANSFER, *sizes)
        passes[-1:] += cost(Work.HEAD, sizes[-1])
        now += passes.max()
        assert executor.due_s() == pytest.approx(now)
        assert executor.ready() == (not passes.any())
        output = executor.collect()
        assert clock.now() == pytest.approx(now)
        assert [i for a in output.answers for i in a.node_ids.tolist()] == on[-1]
        pruned = int(rng.integers(0, 9)) * (step % 2)
        kept = [i for nodes in on for i in nodes if not pruned or rng.random() < 0.6]
        on = [[i for i in nodes if i in kept] for nodes in on]
        commit = new_commit(1, step, kept=sorted([*kept, next_id]), retired=())
        executor.commit([replace(commit, num_examined=pruned)] if pruned else [], output)
        ends = cost(Work.TRANSFER, len(on[0]), len(on[1]), len(output.answers))
        ends += cost(Work.PRUNE, pruned)
        now += ends.max()
        busy += passes + ends
        assert clock.now() == pytest.approx(now)
        assert [clock.busy_s[rank] for rank in (1, 2, 3)] == pytest.approx(busy)


@pytest.mark.parametrize(
    ("name", "clock", "keys", "message"),
    [
        ("specpipe", MeasuredClock(), {"transport": "distributed"}, "ranks=Ranks"),
        ("specpipe", MeasuredClock(timeline=Timeline()), {}, "trace=true"),
        ("specpipe", PacedClock(toys.profile(5.0, 1.0)), {}, "clock=paced"),
        ("dsi", PacedClock(toys.profile(5.0, 1.0)), {}, "clock=paced"),
    ],
)
def test_times_that_one_process_cannot_have_are_refused(
    name: str, clock: Any, keys: dict[str, Any], message: str
) -> None:
    """Also before models are loaded, for keys that would be refused then."""
    times: Any = {"clock": clock.kind, "tracing": clock.timeline is not None}
    PipelineExecutor.check({"transport": "distributed"}, **times)
    if name == "specpipe":
        keys = {"stages": 3, **keys}
        if "transport" not in keys:
            with pytest.raises(UserError, match=message):
                PipelineExecutor.check({}, **times)
    with pytest.raises(UserError, match=message):
        build(name, Workbench(toys.pair(), clock=clock), **keys)


@pytest.mark.parametrize(
    ("executor", "keys"),
    [
        (LocalExecutor, {}),
        (PipelineExecutor, {"stages": 3, "transport": "distributed"}),
        (ReplicasExecutor, {"replicas": 2, "transport": "distributed"}),
    ],
)
def test_a_simulated_clock_needs_no_processes(executor: type[Executor], keys: Any) -> None:
    """Latency and number of batches are those of the plan."""
    bench = Workbench(toys.pair(), clock=toys.simulated(5.0, 1.0), seed=toys.SEED)
    how = planned(executor, bench.pair, **keys)
    source, policy, verifier = NullSource(), RootOnly(), MatchVerifier()
    parts = bench.parts(source=source, policy=policy, verifier=verifier, executor=how)
    built = parts.executor
    assert (how.plan.latency, how.plan.in_flight) == (built.latency, built.in_flight)
    toys.assert_plain(decode_cases(parts, toys.cases()[:2]), toys.cases()[:2])


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("specpipe", {"stages": 3, "width": 4, "children": 3}),
        ("best_first", {"bs": 6, "w": 2, "d": 2}),
        ("ppsd", {}),
        ("eesd_multi", {"further_exits": [2]}),
        ("dsi", {"replicas": 2}),
    ],
)
def test_requests_that_have_ended_leave_nothing_behind(name: str, keys: dict[str, Any]) -> None:
    """Otherwise the memory of a server grows with every request. Greedy: equal work each time."""
    sizes = {"hidden_size": 16, "num_heads": 2, "vocab_size": 24, "max_positions": 64, "seed": 3}
    models = build_random(
        num_layers=4, draft_layers=3, exit_layer=1, exit_head="transformer", **sizes
    )
    parts = build(name, Workbench(models, clock=toys.simulated(10.0, 3.0)), **keys)
    rules = [SamplingParams(), SamplingParams(no_repeat_ngram=2), SamplingParams()]
    found = []
    for first in (0, 10, 20):
        requests = [
            new_request(first + i, range(2, 4 + 3 * i), 9, rule) for i, rule in enumerate(rules)
        ]
        list(parts.decode(parts.new_state(), requests, batch_size=2, prefill_chunk=3))
        held = [one for one in reachable(parts) if isinstance(one, dict | list | set | deque)]
        found.append(sum(map(len, held)))
    assert found[1] == found[2]
