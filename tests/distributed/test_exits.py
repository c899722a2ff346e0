"""Early exits on ranks give the candidates, steps and counts of the in-process pipeline.

Ranks are threads here; ``test_equality.py`` also uses processes.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdec.clocks.meter import Meter
from specdec.models.frozen import FrozenModel
from specdec.train.drafter import OutputOptions
from specdec.train.heads import ExitDrafter, ExitSpec
from specdec.types import Batch, Exits, Output, PrefillChunk, TreeRows
from tests.distributed.fake_ranks import ThreadGroup, thread_ranks
from tests.distributed.support import PROMPTS, config, counted, rejection, runner
from tests.pretrained import models_made, pretrained
from tests.shapes import saved_llama

pytestmark = pytest.mark.slow

EVERY_STEP = ("layer", "node_ids", "tokens", "logprobs", "counts", "probs")


@pytest.fixture(autouse=True)
def group() -> Iterator[ThreadGroup]:
    """Eight ranks, of which executors use the first ones."""
    with thread_ranks(9) as made:
        yield made


def exits(strategy: str, stages: int, layer: int, sampling: str = "t06", **keys: Any) -> dict:
    """Configuration of an 8-layer model with an exit after ``layer`` layers."""
    head = keys.pop("head", "transformer")
    return config(
        strategy, stages, sampling, model__exit_layer=layer, model__exit_head=head, **keys
    )


def decoded(values: dict[str, Any], transport: str) -> tuple[list[dict], list[list[Exits]]]:
    """Counts of each prompt, and the exits of each step."""
    values["executor"]["transport"] = transport
    results: list[dict] = []
    steps: list[list[Exits]] = []
    with runner(values) as made:
        collect = made.parts.executor.collect

        def noting(*, wait: bool = True) -> Output:
            output = collect(wait=wait)
            steps.append(list(output.exits))
            return output

        made.parts.executor.collect = noting  # type: ignore[method-assign]
        made.run(PROMPTS, lambda result: results.append(counted(result)))
    return results, steps


def same_exits(values: dict[str, Any]) -> None:
    """Compares transports step by step."""
    expected, known = decoded(values, "in_process")
    found, steps = decoded(values, "distributed")
    assert found == expected
    assert sum(len(exits.node_ids) for step in known for exits in step) > 0
    assert [len(step) for step in steps] == [len(step) for step in known]
    for step, others in zip(steps, known, strict=True):
        for mine, theirs in zip(step, others, strict=True):
            assert mine.request == theirs.request
            for name in EVERY_STEP:
                here, there = (
                    getattr(e, name, getattr(e.candidates, name, None)) for e in (mine, theirs)
                )
                assert (here is None) == (there is None)
                assert here is None or np.array_equal(here, there), name


@pytest.mark.parametrize(
    ("strategy", "stages", "layer", "head", "sampling"),
    [
        ("ppsd", 3, 3, "transformer", "t06"),  # S = E, and a shorter last stage
        ("ppsd_tree", 3, 3, "norm", "greedy"),
        ("ppsd", 8, 6, "norm", "t06"),  # S < E: a draft takes six steps
        ("ppsd_tree", 8, 3, "transformer", "t06"),  # levels of several nodes pass the exit
        ("ppsd_tree", 4, 5, "norm", "t06"),  # inside the third stage
        ("ppsd_tree", 2, 6, "transformer", "greedy"),  # the exit's rank is the one that answers
        ("ppsd", 3, 4, "transformer", "no_repeat4"),  # histories on the exit's rank
        ("ppsd_multi", 4, 2, "transformer", "t06"),  # exits 2 and 4, of two ranks
        ("ppsd_multi", 8, 3, "norm", "greedy"),  # exits 3 and 6, both of later ranks
        ("ppsd_multi", 2, 2, "norm", "t06"),  # both of one rank
        ("ppsd_multi", 2, 4, "transformer", "t06"),  # the second of the rank that answers
        ("ppsd_multi", 3, 2, "norm", "no_repeat4"),  # histories on both ranks
    ],
)
def test_exits_of_ranks_are_those_of_one_process(
    strategy: str, stages: int, layer: int, head: str, sampling: str
) -> None:
    same_exits(exits(strategy, stages, layer, sampling, head=head))


@pytest.mark.parametrize(
    ("strategy", "stages", "layer", "sampling", "keys"),
    [
        ("ppsd", 3, 3, "greedy", {}),
        ("ppsd", 8, 6, "t06", {"batch_size": 2}),
        ("ppsd", 3, 4, "no_repeat4", {}),
        ("ppsd", 3, 2, "t08", {"batch_size": 2, "verifier": rejection()}),
        ("ppsd_tree", 4, 3, "t06", {}),  # parts of a batch are pruned on its way
        ("ppsd_tree", 2, 5, "greedy", {"executor__groups": [1, 3]}),
        ("ppsd_multi", 4, 2, "t06", {}),
        ("ppsd_multi", 4, 2, "t08", {"verifier": rejection()}),
    ],
)
def test_ranks_that_run_free_decode_the_same_tokens(
    strategy: str, stages: int, layer: int, sampling: str, keys: dict[str, Any]
) -> None:
    values = exits(strategy, stages, layer, sampling, executor__lock_step=False, **keys)
    expected, _ = decoded(values, "in_process")
    found, _ = decoded(values, "distributed")
    assert sorted((r["id"], r["output"]) for r in found) == sorted(
        (r["id"], r["output"]) for r in expected
    )


def test_distributions_travel() -> None:
    """Rejection needs the distributions of the candidates and of the target."""
    same_exits(exits("ppsd", 2, 6, "t08", verifier=rejection()))
    same_exits(exits("ppsd", 3, 2, "t08", verifier=rejection(), batch_size=2))
    same_exits(exits("ppsd_multi", 4, 2, "t08", verifier=rejection(), batch_size=2))
    same_exits(exits("ppsd_multi", 2, 2, "t08", verifier=rejection()))


@pytest.mark.parametrize("groups", [[2, 1], [1, 3]])
def test_stages_of_several_devices(groups: list[int]) -> None:
    """The exit is on one device of a stage; the others send rows on within the step."""
    same_exits(exits("ppsd_tree", 2, 5, executor__groups=groups))
    three = exits("ppsd_multi", 2, 2, executor__groups=groups)
    three["source"]["further_exits"] = [3, 7]  # of [2, 1], two ranks of one stage have them
    same_exits(three)


@pytest.mark.parametrize(
    ("kind", "matrix", "trained"),
    [("norm", "own", True), ("transformer", "shared", True), ("transformer", "own", False)],
)
def test_a_rank_loads_its_layers_and_the_head(
    kind: str, matrix: str, trained: bool, tmp_path: Path
) -> None:
    """A rank that loads layers 1 and 2 from disk computes the same exit as the whole model."""
    target = FrozenModel(saved_llama(tmp_path, 4))
    spec, output = ExitSpec(head=kind, layers=(2,)), OutputOptions(matrix=matrix)
    ExitDrafter(target, spec, output, None).save(tmp_path / "heads")
    logits, loaded = [], []
    for parts_only in (False, True):
        heads = str(tmp_path / "heads") if trained else None
        pair = pretrained(tmp_path, exit_layer=2, exit_head=kind, exit_heads=heads)
        pair = pair.without_target() if parts_only else pair
        made = models_made(pair)
        stage = pair.exit_stage(1, 3, Meter(), (2,))
        stage.open(1, 8)
        batch = Batch(step=0, prefills=(PrefillChunk(request=1, start=0, tokens=np.arange(5)),))
        hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(2))
        logits.append(stage.run(batch, hidden).hidden)
        row = TreeRows(request=1, prefix_len=5, tokens=np.array([3]), paths=np.array([[0]]))
        logits.append(stage.run(Batch(step=1, trees=(row,)), hidden[:1]).exit_logits[2])
        loaded.append("target" in made)
    assert torch.equal(logits[0], logits[2])
    assert torch.equal(logits[1], logits[3])
    assert loaded == [True, False], "a rank must not read the whole target"
