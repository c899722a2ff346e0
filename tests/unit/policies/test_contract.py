"""What every policy owes the loop, and what it refuses. ``CheckedPolicy`` asserts on every step."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from specdec.interfaces import TreePolicy
from specdec.policies import BestFirst, BestOfBeam, Chain, FixedWidth, RootOnly, Static
from strategies.flowspec import FlowSpec
from strategies.pearl import Pearl
from strategies.pipeinfer import PipeInfer
from strategies.specpipe_bf import PipelineBestFirst
from strategies.ssd import Ssd
from strategies.staged import StagedTree

from .bench import READY, TableSource, autoregressive, children_of, new_request, new_state, run

POLICIES: dict[str, Callable[[], TreePolicy]] = {
    "root": RootOnly,
    "chain": lambda: Chain(gamma=4),
    "static": lambda: Static(branching=[2, 1, 3, 1]),
    "specinfer": Static,
    "ahead": lambda: Static(branching=[2, 1, 3, 1], draft_overlap="rule", guesses=3),
    "fixed": lambda: FixedWidth(width=6, children=4),
    "fixed2": lambda: FixedWidth(width=5, children=3, levels_per_step=2),
    "fixed_serial": lambda: FixedWidth(width=5, children=3, levels_per_step=None, depth=4),
    "best": lambda: BestFirst(bs=8, w=4, d=3),
    "best_async": lambda: BestFirst(bs=8, w=4, d=3, asynchronous=True),
    "best_few": lambda: BestFirst(bs=8, w=4, d=2, asynchronous=True, children=2),
    "best_late": lambda: BestFirst(bs=8, w=4, d=2, asynchronous=True, min_mass=0.2),
    "best_until_ready": lambda: BestFirst(bs=8, w=4, d=None, asynchronous=True),
    "best_of_beam": lambda: BestOfBeam(nodes=10, width=3, children=3, depth=3),
    "pipe_best": lambda: PipelineBestFirst(width=6, children=4),
    "pipe_best1": lambda: PipelineBestFirst(width=6, children=4, draft_passes=1),
    "pearl": lambda: Pearl(gamma=3),
    "pearl_in_steps": lambda: Pearl(gamma=5, latency=3),
    "pipe_runs": lambda: PipeInfer(tokens=2, cutoff=0.2, recovery=0.1, decay=0.05),
    "pipe_best_segments": lambda: FlowSpec(
        nodes=12, segment=4, width=3, children=4, depth=3, grown_nodes=10
    ),
    "ssd": lambda: Ssd(gamma=3, outcomes=6),
    "ssd_in_steps": lambda: Ssd(gamma=3, outcomes=6, latency=3),
    "staged": lambda: StagedTree(inner=Chain(gamma=3), extend_leaves=2, extend_depth=3),
    "staged_best": lambda: StagedTree(
        inner=BestFirst(bs=6, w=3, d=3), extend_leaves=2, extend_depth=2
    ),
}


def source_for(name: str, *, silent: bool = False) -> TableSource:
    """A source; a silent one knows nothing of a third of the contexts."""
    rule = (lambda c: sum(c[-2:]) % 3 == 0) if silent else (lambda c: False)
    cheap = TableSource(table=lambda c: children_of(c, salt=1), silent=rule)
    return TableSource(cheap=cheap if name.startswith("staged") else None, silent=rule)


@pytest.mark.parametrize(("latency", "silent"), [(1, False), (4, True)])
@pytest.mark.parametrize("name", POLICIES)
def test_output_is_the_targets_own(name: str, latency: int, silent: bool) -> None:
    """Any policy on any latency, alone and among others: the target's own tokens, exactly."""
    done = run(
        POLICIES[name](),
        latency=latency,
        num_requests=3,
        batch_size=2,
        source=source_for(name, silent=silent),
        max_new_tokens=20,
    )
    for request in done.requests:
        prompt = request.tokens[: request.num_prompt].tolist()
        assert request.output == autoregressive(prompt, 20)


@pytest.mark.parametrize("name", [n for n in POLICIES if n != "root"])
def test_speculation_saves_steps(name: str) -> None:
    """A policy that submitted roots only would pass every other test of this file."""
    feeding = ("fixed", "pipe_", "best_pipe", "best_cont")
    pipelined = name.startswith(feeding) and name != "fixed_serial"
    latency = 4 if pipelined else 1
    plain = run(RootOnly(), latency=latency).steps
    assert run(POLICIES[name](), latency=latency, source=source_for(name)).steps < 0.8 * plain


@pytest.mark.parametrize("name", POLICIES)
def test_runs_are_repeatable_and_batch_mates_change_nothing(name: str) -> None:
    """The same trees alone, again, and in a batch: nothing leaks from request to request."""
    logs = []
    for batch_size in (1, 1, 2):
        done = run(
            POLICIES[name](),
            latency=3,
            num_requests=2,
            batch_size=batch_size,
            source=source_for(name),
            max_new_tokens=15,
            prefill_chunk=99,
        )
        log = done.policy.log
        logs.append([[s.chosen for s in log if s.request == r and s.chosen] for r in range(2)])
    assert logs[0] == logs[1] == logs[2]


@pytest.mark.parametrize("name", [n for n in POLICIES if n != "root"])
def test_one_source_call_per_round_for_all_requests(name: str) -> None:
    """Five requests in a batch cost as many source calls as the busiest of them, not the sum."""
    alone = new_state(new_request(1))
    together = new_state(*(new_request(i) for i in range(5)))
    calls = []
    for state in (alone, together):
        source, policy = source_for(name), POLICIES[name]()
        for step in range(3):
            nodes = policy.select(state, source)
            state.step = step
            state.mark_submitted(nodes)
            policy.overlap(state, source, READY)
        assert all(len(call) == len(state.requests) for call in source.calls)
        calls.append((len(source.calls), source.widths))
    assert calls[0] == calls[1]
    assert calls[0][0] > 0


def test_requests_in_prefill_or_finished_get_no_nodes() -> None:
    for name, make in POLICIES.items():
        filling, over, live = new_request(1), new_request(2), new_request(3)
        state = new_state(filling, over, live)
        filling.prefill_sent -= 1
        over.cancel()
        nodes = make().select(state, source_for(name))
        assert [request for request, _ in nodes.items] == [3], name


def test_serial_policies_declare_it_and_values_matter_only_for_beams() -> None:
    made = {name: make() for name, make in POLICIES.items()}
    waiting = {name for name, policy in made.items() if policy.serial}  # type: ignore[attr-defined]
    feeding = {"fixed", "fixed2", "pipe_best", "pipe_best1", "pipe_runs", "pipe_best_segments"}
    assert set(made) - waiting == feeding
    dependent = {name for name, policy in made.items() if policy.value_dependent}
    staged = {name for name, policy in made.items() if isinstance(policy, StagedTree)}
    ahead = {"ahead"}  # which nodes it drafts under depends on the values
    assert dependent == {n for n in made if "fixed" in n or "best" in n} | staged | ahead
    assert all(isinstance(policy, TreePolicy) for policy in made.values())
