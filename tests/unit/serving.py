"""Random schedules of many requests: who arrives when, what shares a step, who is cancelled."""

from dataclasses import dataclass, field
from functools import cache

import numpy as np

from specdec.clocks import CostCurve, LatencyProfile, SimulatedClock
from specdec.compose.workbench import Parts, Workbench
from specdec.interfaces import TreePolicy
from specdec.pairs import RandomPair
from specdec.policies import FixedWidth, RootOnly, Static
from specdec.sampling.transform import SamplingParams
from specdec.serving import Feeding, ServingRules
from specdec.sources import DraftModelSource
from specdec.state import RequestState
from specdec.types import IntArray
from specdec.verifiers import MatchVerifier
from strategies.specpipe_bf import PipelineBestFirst
from strategies.specpipe_db import AdaptiveWidth
from tests.states import new_request

SEED = 5
NEW_TOKENS = 5
STAGES = 2
COSTS = {
    "stage": CostCurve(tokens=(1, 8), ms=(10.0, 14.0)),
    "draft": CostCurve(tokens=(1,), ms=(4.0,)),
}
PROFILE = LatencyProfile(name="tiny", costs=COSTS)
SAMPLINGS = (SamplingParams(), SamplingParams(temperature=0.9))


@cache
def pair() -> RandomPair:
    """Two layers, one per stage; the draft is the first of them."""
    return RandomPair(num_layers=STAGES, hidden_size=16, num_heads=2, vocab_size=24, seed=3)


@cache
def prompts() -> tuple[IntArray, ...]:
    """Prompts of 1 to 12 tokens; a request's id says which."""
    rng = np.random.default_rng(1)
    return tuple(rng.integers(0, 24, n, np.int64) for n in (1, 2, 3, 5, 7, 9, 11, 12))


def request(request_id: int, sampling: int, arrival_s: float = 0.0) -> RequestState:
    return new_request(
        request_id,
        prompts()[request_id % len(prompts())],
        NEW_TOKENS,
        SAMPLINGS[sampling],
        arrival_s=arrival_s,
    )


@cache
def plain(request_id: int, sampling: int) -> tuple[int, ...]:
    """The request's own autoregressive run: alone, on one device."""
    made = parts(RootOnly(), ServingRules(), None)
    alone = request(request_id, sampling)
    for _ in made.decode(made.new_state(), [alone]):
        pass
    return tuple(alone.output)


@cache
def _bench() -> Workbench:
    return Workbench(pair(), seed=SEED)


def parts(policy: TreePolicy, rules: ServingRules, stages: int | None) -> Parts:
    """A strategy on a virtual clock of its own."""
    bench = _bench()
    bench.clock = SimulatedClock(PROFILE)
    return bench.parts(
        source=DraftModelSource(runner=bench.draft_runner()),
        policy=policy,
        verifier=MatchVerifier(),
        stages=stages,
        serving=rules,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One random case.

    Attributes:
        cancels: step -> ids of the requests that are cancelled after it.
    """

    policy: str
    rules: ServingRules
    stages: int | None
    batch_size: int
    prefill_chunk: int
    sampling: int
    arrivals: dict[int, float]
    cancels: dict[int, list[int]] = field(default_factory=dict)


def new_policy(name: str, stages: int | None) -> TreePolicy:
    """A policy that speculates little: trees of a few nodes."""
    latency = stages or 1
    made: dict[str, TreePolicy] = {
        "root_only": RootOnly(),
        "fixed_width": FixedWidth(width=3, children=2),
        "adaptive_width": AdaptiveWidth(width=4, children=2, latency=latency, profile=PROFILE),
        "static": Static(branching=[2, 1]),
        "pipe_best": PipelineBestFirst(width=3, children=2),
    }
    return made[name]


def random_schedule(seed: int) -> Schedule:
    """Arrivals, cancellations and cache pressure, all drawn."""
    rng = np.random.default_rng(seed)
    policies = ["root_only", "fixed_width", "adaptive_width", "static", "pipe_best"]
    name = str(rng.choice(policies, p=[0.1, 0.3, 0.3, 0.15, 0.15]))
    stages = None if rng.random() < 0.2 else STAGES
    block = int(rng.choice([1, 3, 4]))
    # The largest need: 12 prompt tokens, the new ones, and the policy's largest tree.
    most = 12 + NEW_TOKENS + new_policy(name, stages).max_cached_nodes(stages or 1)
    room = float(rng.choice([1.0, 1.5, 3.0]))  # requests of the largest need that fit
    paged = rng.random() < 0.75
    ids = rng.choice(16, int(rng.integers(2, 6)), replace=False).tolist()
    cancelled = [i for i in ids if rng.random() < 0.25]
    cancels: dict[int, list[int]] = {}
    for i in cancelled:
        cancels.setdefault(int(rng.integers(0, 12)), []).append(i)
    return Schedule(
        policy=name,
        rules=ServingRules(
            feeding=Feeding(rng.choice(list(Feeding))),
            prefill_first=bool(rng.random() < 0.3),
            kv_tokens=-(-int(room * most) // block) * block if paged else None,
            block_tokens=block,
        ),
        stages=stages,
        batch_size=int(rng.integers(1, 5)),
        prefill_chunk=int(rng.choice([2, 5, 64])),
        sampling=int(rng.integers(0, 2)),
        arrivals={i: float(rng.choice([0.0, rng.exponential(0.05)])) for i in ids},
        cancels=cancels,
    )


def play(schedule: Schedule) -> str:
    """Decodes a schedule; what is wrong with the outcome, or ""."""
    made = parts(new_policy(schedule.policy, schedule.stages), schedule.rules, schedule.stages)
    requests = {i: request(i, schedule.sampling, at) for i, at in schedule.arrivals.items()}
    state, ended = made.new_state(), []
    steps = made.decode(
        state,
        requests.values(),
        batch_size=schedule.batch_size,
        prefill_chunk=schedule.prefill_chunk,
        on_finish=lambda r: ended.append(r.id),
    )
    for _ in steps:
        for i in schedule.cancels.get(state.step - 1, []):
            requests[i].cancel()
        if state.step > 2000:
            return "no end"
    if sorted(ended) != sorted(requests):
        return f"ended: {ended}, of {sorted(requests)}"
    for i, decoded in requests.items():
        expected, output = plain(i, schedule.sampling), tuple(decoded.output)
        whole = decoded.finish_reason != "cancelled"
        if output != expected[: len(output)] or (whole and output != expected):
            return f"request {i}: {output} instead of {expected}"
    for pool in pools(made):
        if pool.num_used:
            return f"{pool.num_used} blocks were not given back"
    return ""


def pools(made: Parts) -> list:  # type: ignore[type-arg]
    """The pools of all stages; none where caches are not paged."""
    stages = [part.stage for part in made.executor.stages]  # type: ignore[attr-defined]
    return [stage.pool for stage in stages if stage.pool is not None]
