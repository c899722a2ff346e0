"""Early exits over paged caches: the layers and a transformer head keep their entries in blocks."""

from functools import cache, partial

import pytest

from specdec.attention.tree_attention import BlockPool
from specdec.certify.cases import parity_cases
from specdec.certify.oracle import Oracle
from specdec.compose.workbench import Parts, Workbench, planned
from specdec.executors import EarlyExitExecutor, PipelineExecutor
from specdec.pairs.random import build_random
from specdec.policies import Chain, FixedWidth
from specdec.sampling.transform import SamplingParams
from specdec.serving import ServingRules
from specdec.sources import EarlyExitSource
from specdec.testing import decode_cases
from specdec.verifiers import MatchVerifier
from tests.reachable import reachable

RULES = ServingRules(kv_tokens=80, block_tokens=4)  # for two or three requests at a time


@cache
def _bench() -> Workbench:
    sizes = {"hidden_size": 16, "num_heads": 2, "vocab_size": 24, "max_positions": 64, "seed": 3}
    return Workbench(
        build_random(num_layers=3, exit_layer=1, exit_head="transformer", **sizes), seed=5
    )


def _paged(how: str) -> Parts:
    bench, drafts_first = _bench(), how == "eesd"
    cls = EarlyExitExecutor if drafts_first else PipelineExecutor
    executor = planned(cls, bench.pair, stages=3)
    bench._first_stage = None
    return bench.parts(
        source=EarlyExitSource(
            pair=bench.pair,
            make_first_stage=partial(bench.make_first_stage, executor.plan)
            if drafts_first
            else None,
        ),
        policy=Chain(gamma=2) if drafts_first else FixedWidth(width=2, children=2),
        verifier=MatchVerifier(),
        executor=executor,
        serving=RULES,
    )


@pytest.mark.parametrize(("how", "num_pools"), [("eesd", 3), ("ppsd", 4)])
def test_every_cache_is_in_blocks_and_gives_them_back(how: str, num_pools: int) -> None:
    """The layers before the exit, its head, and the rest: one stage of it, or two."""
    parts, oracle = _paged(how), Oracle(_bench().pair.target, seed=5)
    rules = {"greedy": SamplingParams(), "sampled": SamplingParams(temperature=0.8)}
    cases = parity_cases(rules, per_sampling=3, vocab_size=24, num_tokens=9)
    found = decode_cases(parts, cases, batch_size=3, prefill_chunk=5)
    expected = {case.id: oracle.decode(case).output for case in cases}
    assert {i: one.output for i, one in found.items()} == expected
    pools = [one for one in reachable(parts.executor) if isinstance(one, BlockPool)]
    assert len(pools) == num_pools
    for pool in pools:
        assert pool.num_used == 0
        assert 4 < pool.peak <= pool.num_blocks == 20
