"""What every policy owes the loop (``specdec.testing.check_policy``)."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest

from specdec.interfaces import TokenSource, TreePolicy
from specdec.policies import BestFirst, BestOfBeam, Chain, FixedWidth, RootOnly, Static
from specdec.state import DecodeState
from specdec.testing import check_policy
from specdec.types import Nodes
from strategies.flowspec import FlowSpec
from strategies.pearl import Pearl
from strategies.pipeinfer import PipeInfer
from strategies.specpipe_bf import PipelineBestFirst
from strategies.ssd import Ssd

from .bench import READY, TableSource, new_request, new_state, run

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
}


def source_for(*, silent: bool = False) -> TableSource:
    """A source; a silent one knows nothing of a third of the contexts."""
    rule = (lambda c: sum(c[-2:]) % 3 == 0) if silent else (lambda c: False)
    return TableSource(silent=rule)


@pytest.mark.parametrize("name", POLICIES)
def test_rules_and_the_targets_own_output(name: str) -> None:
    check_policy(POLICIES[name], make_source=lambda silent: source_for(silent=silent))


@pytest.mark.parametrize("name", [n for n in POLICIES if n != "root"])
def test_speculation_saves_steps(name: str) -> None:
    """A policy that submitted roots only would pass every other test of this file."""
    feeding = ("fixed", "pipe_", "best_pipe", "best_cont")
    pipelined = name.startswith(feeding) and name != "fixed_serial"
    latency = 4 if pipelined else 1
    plain = run(RootOnly(), latency=latency).steps
    assert run(POLICIES[name](), latency=latency, source=source_for()).steps < 0.8 * plain


@pytest.mark.parametrize("name", [n for n in POLICIES if n != "root"])
def test_one_source_call_per_round_for_all_requests(name: str) -> None:
    """Five requests in a batch cost as many source calls as the busiest of them, not the sum."""
    alone = new_state(new_request(1))
    together = new_state(*(new_request(i) for i in range(5)))
    calls = []
    for state in (alone, together):
        source, policy = source_for(), POLICIES[name]()
        for step in range(3):
            nodes = policy.select(state, source)
            state.step = step
            state.mark_submitted(nodes)
            policy.overlap(state, source, READY)
        assert all(len(call) == len(state.requests) for call in source.calls)
        calls.append((len(source.calls), source.widths))
    assert calls[0] == calls[1]
    assert calls[0][0] > 0


class Faulty(Chain):
    """A chain with one fault."""

    def __init__(self, fault: str) -> None:
        super().__init__(gamma=3)
        self.fault = fault

    def select(self, state: DecodeState, source: TokenSource) -> Nodes:
        if self.fault == "prefill":
            for request in state.requests.values():
                request.prefill_sent = request.num_prefill
        nodes = super().select(state, source)
        items = dict(nodes.items)
        for request_id, ids in items.items():
            if self.fault == "backwards":
                items[request_id] = ids[::-1]
            elif self.fault == "orphans":
                items[request_id] = ids[-1:]
            elif self.fault == "stranger":
                items[request_id] = ids + 1000
        return Nodes(tuple(items.items()))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("none", ""),
        ("prefill", "in prefill or over"),
        ("backwards", "in order"),
        ("orphans", "before its parent"),
        ("stranger", "not in the tree"),
    ],
)
def test_a_broken_rule_is_named(fault: str, message: str) -> None:
    expected = pytest.raises(AssertionError, match=message) if message else nullcontext()
    with expected:
        check_policy(lambda: Faulty(fault))


def test_serial_policies_declare_it_and_values_matter_only_for_beams() -> None:
    made = {name: make() for name, make in POLICIES.items()}
    waiting = {name for name, policy in made.items() if policy.serial}  # type: ignore[attr-defined]
    feeding = {"fixed", "fixed2", "pipe_best", "pipe_best1", "pipe_runs", "pipe_best_segments"}
    assert set(made) - waiting == feeding
    dependent = {name for name, policy in made.items() if policy.value_dependent}
    ahead = {"ahead"}  # which nodes it drafts under depends on the values
    assert dependent == {n for n in made if "fixed" in n or "best" in n} | ahead
    assert all(isinstance(policy, TreePolicy) for policy in made.values())
