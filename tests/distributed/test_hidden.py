"""Hidden states from ranks equal those of the in-process pipeline.

Ranks are threads here; ``test_equality.py`` also uses processes.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

from specdec.clocks.meter import Meter
from specdec.compose.workbench import Parts, Workbench, planned
from specdec.distributed.messages import Kind, Message
from specdec.distributed.ranks import Ranks
from specdec.executors import PipelineExecutor
from specdec.interfaces import TreePolicy
from specdec.models.medusa import MedusaHeads
from specdec.policies import FixedWidth, Static
from specdec.sampling.transform import SamplingParams
from specdec.sources import DraftModelSource
from specdec.state import StopRules
from specdec.testing import Case, decode_steps
from specdec.types import HiddenName, Needs, Output, PromptHidden
from specdec.verifiers import MatchVerifier
from tests.distributed.fake_ranks import ThreadGroup, thread_ranks
from tests.distributed.support import PROMPTS, config, pair, rejection, same
from tests.pretrained import models_made, pretrained
from tests.shapes import saved_llama

pytestmark = pytest.mark.slow

NAMES = tuple(HiddenName(layer) for layer in (0, 4, 7))  # of 8: the first, one inside, and the last
LEVELS = FixedWidth(width=5, children=3)
WITH_ANSWERS = Needs(hidden=NAMES)
Layout: TypeAlias = dict[str, Any]  # keys of the executor
States: TypeAlias = Mapping[HiddenName, torch.Tensor]


@pytest.fixture(autouse=True)
def group() -> Iterator[ThreadGroup]:
    """Eight ranks, of which executors use the first ones."""
    with thread_ranks(9) as made:
        yield made


def reading(
    policy: TreePolicy, layout: Layout, *, over_ranks: bool, needs: Needs = WITH_ANSWERS
) -> Parts:
    """A draft model source that also requests hidden states."""
    ranks = Ranks(model=config("ar", 2)["model"], clock={"kind": "measured"}, threads=1)
    bench = Workbench(pair(), seed=11, ranks=ranks if over_ranks else None)
    source = DraftModelSource(runner=bench.draft_runner())
    source.needs = needs
    executor = planned(
        PipelineExecutor,
        bench.pair,
        transport="distributed" if over_ranks else "in_process",
        **layout,
    )
    return bench.parts(source=source, policy=policy, verifier=MatchVerifier(), executor=executor)


def outputs(parts: Parts) -> list[Output]:
    """The executor's output in each step, for three prompts of which two run at a time."""
    found, collect = [], parts.executor.collect

    def noting(*, wait: bool = True) -> Output:
        found.append(collect(wait=wait))
        return found[-1]

    parts.executor.collect = noting  # type: ignore[method-assign]
    stop = StopRules(max_new_tokens=8)
    params = [SamplingParams(), SamplingParams(temperature=0.7), SamplingParams(temperature=0.9)]
    cases = [
        Case(prompt.id, "", tuple(prompt.tokens.tolist()), sampling, stop)
        for prompt, sampling in zip(PROMPTS, params, strict=True)
    ]
    try:
        for _ in decode_steps(parts, cases, {}, batch_size=2, prefill_chunk=4):
            pass
    finally:
        parts.executor.shutdown()
    return found


def same_rows(policy: TreePolicy, layout: Layout) -> int:
    """Compares transports step by step; returns the number of tree rows compared."""
    expected = outputs(reading(policy, layout, over_ranks=False))
    parts = reading(policy, layout, over_ranks=True)
    assert parts.executor.hidden == NAMES
    steps = outputs(parts)
    compared = 0
    for known, found in zip(expected, steps, strict=True):
        assert [a.request for a in known.answers] == [a.request for a in found.answers]
        assert [_place(p) for p in known.prompts] == [_place(p) for p in found.prompts]
        for theirs, mine in zip(known.answers, found.answers, strict=True):
            assert mine.node_ids.tolist() == theirs.node_ids.tolist()
            _equal(mine.hidden, theirs.hidden)
            compared += len(mine.node_ids)
        for other, chunk in zip(known.prompts, found.prompts, strict=True):
            _equal(chunk.hidden, other.hidden)
    prompt_rows = sum(len(p.hidden[NAMES[0]]) for step in steps for p in step.prompts)
    assert prompt_rows == sum(len(prompt.tokens) - 1 for prompt in PROMPTS)
    return compared


def _place(chunk: PromptHidden) -> tuple[int, int]:
    return chunk.request, chunk.start


def _equal(mine: States, theirs: States) -> None:
    assert set(mine) == set(theirs) == set(NAMES)
    for name in NAMES:
        assert mine[name].dtype == torch.float64
        assert torch.equal(mine[name], theirs[name])


@pytest.mark.parametrize(
    "layout",
    [
        {"stages": 1},  # latency 1
        {"stages": 3},
        {"stages": 8},
        {"stages": 2, "groups": [2, 1]},  # two ranks of one stage have layers that are needed
    ],
)
def test_rows_are_those_of_one_process(layout: Layout) -> None:
    """Rows in flight are pruned on the ranks and in rank 0's records."""
    policy = LEVELS if layout["stages"] > 1 else Static(branching=[3, 2])
    assert same_rows(policy, layout) >= 24


def test_heads_that_sample_count_what_they_do_in_one_process() -> None:
    chain = {"_target_": "specdec.policies.Chain", "gamma": 3}
    same(config("medusa", 3, "t08", batch_size=2, verifier=rejection(), policy=chain))


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_rows_keep_their_type_on_the_wire(dtype: str) -> None:
    rows = [torch.randn(3, 5).to(getattr(torch, dtype)) for _ in range(2)]
    arrived = Message.unpack(Message(Kind.HIDDEN, 4, 9, rows).pack())
    assert (arrived.session, arrived.tick) == (4, 9)
    for mine, expected in zip(arrived.body, rows, strict=True):
        assert mine.dtype == expected.dtype
        assert torch.equal(mine, expected)


def test_rank_0_loads_the_output_head_and_no_layers(tmp_path: Path) -> None:
    """Heads loaded from disk without the target compute the same as with it."""
    saved_llama(tmp_path, 4)
    logits, loaded = [], []
    for alone in (False, True):
        models = pretrained(tmp_path)
        seen = models.without_target() if alone else models
        made = models_made(seen)
        heads = seen.artefact(MedusaHeads, num_heads=2, meter=Meter())
        assert heads.layer == 3
        hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(2))
        logits.append(heads.logits(2, hidden))
        loaded.append("target" in made)
    assert torch.equal(logits[0], logits[1])
    assert loaded == [True, False]
