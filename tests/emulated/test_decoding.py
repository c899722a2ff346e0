"""Strategies on the emulated device with captured passes produce the tokens of plain decoding.

Faults of a GPU run fail here too: an index tensor left on the host, a value read in a captured
pass, a changing address, an output that the next replay overwrites.
"""

from copy import deepcopy
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from specdec.models.execution import Execution
from specdec.models.random import random_model
from specdec.models.runner import ModelRunner
from specdec.pairs import build_pair
from specdec.runs.runners import PartsRunner, TokenPrompt
from specdec.sampling.transform import SPARE
from specdec.state import StopRules
from specdec.types import TreeRows
from tests.emulated.device import Device, emulated
from tests.matrix.cells import PROMPTS, Cell, all_cells, base, config, cover, plain
from tests.matrix.outcomes import runs
from tests.sampled import sampled
from tests.shapes import runner_of

EXPECTED = {"a copy to the host"}
NUM_PARTS = 4  # of the sample, which is composed when the first one runs
NUM_TOKENS = 5  # of those that plain decoding gives
VOCABULARY = 1000  # more than is copied of a row
SELECTED = 2 * (80 + SPARE)  # numbers of a row with ``t06``: candidates and their ids

pytestmark = pytest.mark.xdist_group("matrix")  # a process composes each cell once


@cache
def chosen() -> tuple[Cell, ...]:
    """Cells with every source, every executor and both kinds of verifiers."""
    cells = [
        cell
        for cell in all_cells()
        # They run in a thread, which the device's mode does not reach.
        if cell.source not in ("background", "model_chain")
        if cell.policy == "static"  # composing all cells would take longer than decoding some
        if (cell.verifier, cell.sampling) in (("match", "t06"), ("rejection", "greedy"))
        if cell.source == "draft_model" or cell.executor in ("local", "early_exit")
    ]
    return tuple(cover(cells, lambda c: {c.source, c.executor, c.verifier}, runs))


def _runner(cell: Cell, **model: Any) -> PartsRunner:
    values = config(cell)
    values["model"].update(device="cuda", graphs="cuda", **model)
    values["serving"] = deepcopy(base()["serving"])  # paged caches are not captured
    stop, pair = StopRules(max_new_tokens=NUM_TOKENS), build_pair(values["model"])
    pair.fitted = lambda name, make, fit: (make(), True)  # training takes 20 s here
    return PartsRunner(cfg=values, pair=pair, stop=stop)


def _decoded(ready: PartsRunner, prompts: tuple[TokenPrompt, ...] = PROMPTS) -> dict:
    outputs = {}
    ready.run(prompts, lambda result: outputs.__setitem__(result.id, result.output))
    return outputs


def _expected(sampling: str) -> dict:
    return {prompt: tokens[:NUM_TOKENS] for prompt, tokens in plain(sampling).items()}


@pytest.mark.slow
@pytest.mark.parametrize("part", sampled(range(NUM_PARTS), every=4))
def test_tokens_are_those_of_plain_decoding(part: int) -> None:
    assert len(chosen()) >= NUM_PARTS
    for cell in chosen()[part::NUM_PARTS]:
        with emulated() as device:
            ready = _runner(cell)
            device.waits.clear()  # of loading
            assert _decoded(ready) == _expected(cell.sampling), cell
            assert set(device.waits) <= EXPECTED, cell
            assert sum(graph.replays for graph in device.graphs) > 0, cell


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["greedy", "t06"])
def test_a_step_is_one_wait_and_a_few_small_copies(sampling: str) -> None:
    """Per pass of plain decoding: the row's best entry, or all of a row that is shorter than k."""
    with emulated() as device:
        ready = _runner(Cell("none", "root_only", "match", "local", sampling))
        _decoded(ready, PROMPTS[:1])  # captures
        _clear(device)
        _decoded(ready, PROMPTS[:1])
        assert device.to_host == [2 if sampling == "greedy" else 32] * NUM_TOKENS
        assert len(device.to_device) == NUM_TOKENS  # inputs of the pass
        assert device.waits == {"a copy to the host": NUM_TOKENS}  # none for timing
        # A pass is a replay; around it buffers are filled and results taken. (Views count, which
        # are no launches.)
        assert device.launches <= 20 * NUM_TOKENS


def _clear(device: Device) -> None:
    device.to_host.clear()
    device.to_device.clear()
    device.waits.clear()
    device.launches = 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "verifier", "sampling"),
    [
        ("chain", "match", "t06"),
        ("best_first", "match", "greedy"),
        ("static", "rejection", "greedy"),
        ("static", "rejection", "t06"),
    ],
)
def test_few_numbers_of_a_row_are_copied(policy: str, verifier: str, sampling: str) -> None:
    """Whole rows only under rejection and greedily, where no top-k limits the distributions."""
    cell = Cell("draft_model", policy, verifier, "local", sampling)
    with emulated() as device:
        ready = _runner(cell, vocab_size=VOCABULARY)
        _clear(device)
        _decoded(ready)
        target, draft = ready.parts.executor.counters, ready.parts.source.counters
        whole = VOCABULARY * (sampling == "greedy" and verifier == "rejection")
        answered = 2 + whole if sampling == "greedy" else SELECTED
        drafted = whole or SELECTED
        assert 0 < sum(device.to_host) <= answered * target.rows + drafted * draft.rows
        # A node whose logits are stored is expanded without a pass.
        assert len(device.to_host) <= (1 + bool(whole)) * target.passes + 2 * draft.passes
        assert set(device.waits) == EXPECTED


def test_outputs_that_are_not_copied_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: returning a replay's outputs without copying them fails, as on a GPU."""
    from specdec.models.backends import graphs as static

    monkeypatch.setattr(static, "_cut", lambda computed, *_: computed)
    cell = Cell("draft_model", "static", "match", "local", "greedy")
    with emulated(), pytest.raises((ValueError, AssertionError)):  # NaN where logits were
        assert _decoded(_runner(cell)) == _expected("greedy")


def test_a_pass_that_looks_at_a_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: Python reads a number during capture."""
    from specdec.models.backends import graphs as static

    original = static._launch

    def looking(eager, shape, inputs):
        assert int(inputs.tokens[0]) >= 0
        return original(eager, shape, inputs)

    monkeypatch.setattr(static, "_launch", looking)
    with emulated(), pytest.raises(Exception, match="not permitted when stream is capturing"):
        _decoded(_runner(Cell("none", "root_only", "match", "local", "greedy")))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("graphs", ["off", "cuda"])
def test_later_slices(family: str, graphs: str) -> None:
    """A captured stage that is not the first: no embeddings, with windows and soft caps."""
    options = {"sliding_window": 6} if family == "gemma2" else None
    whole = random_model(family, dtype="float64", num_layers=2, options=options)
    plain_slice = runner_of(whole, first_layer=1)
    hidden = torch.randn(12, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    expected = _sliced(plain_slice, hidden)
    with emulated() as device:
        model = random_model(family, dtype="float64", device="cuda", num_layers=2, options=options)
        runner = runner_of(model, first_layer=1, execution=Execution(graphs=graphs))
        assert (_sliced(runner, hidden.to("cuda")).cpu() - expected).abs().max() < 1e-12
        assert bool(device.graphs) == (graphs == "cuda")


def _sliced(runner: ModelRunner, hidden: torch.Tensor) -> torch.Tensor:
    """Logits of a tree after a prompt, from hidden states that enter the slice."""
    cache = runner.new_cache(8)
    runner.forward([cache.rows(prefix_tokens=np.arange(3, 10))], hidden=hidden[:7])
    tree = TreeRows.within(
        prefix_len=7,
        node_ids=np.arange(5),
        tokens=np.arange(5),
        parent_ids=np.array([-1, 0, 0, 1, 3]),
    )
    logits = runner.forward([cache.rows(tree=tree)], hidden=hidden[7:]).logits
    assert logits is not None
    return logits


# Passes without graphs make their masks on the device, once per pass, from the rows' bits.

LONG = TokenPrompt(7, 7 * np.arange(300) % 11 + 1)
CHUNK = 16


def decoded_long(emulation: Device | None = None, **model: Any) -> list[int]:
    """Tokens of the long prompt, prefilled in chunks, without graphs; forgets copies of loading."""
    values = config(Cell("draft_model", "static", "match", "local", "greedy"))
    values["model"].update(model, max_positions=512)
    values["serving"] = deepcopy(base()["serving"])
    values["prefill_chunk"] = values["source"]["prefill_chunk"] = CHUNK
    stop = StopRules(max_new_tokens=4)
    runner = PartsRunner(cfg=values, pair=build_pair(values["model"]), stop=stop)
    if emulation is not None:
        emulation.to_device.clear()
        emulation.waits.clear()
    outputs: list[int] = []
    runner.run([LONG], lambda result: outputs.extend(result.output))
    runner.close()
    return outputs


def on_the_device(**model: Any) -> tuple[list[int], Device]:
    with emulated() as device:
        return decoded_long(device, device="cuda", **model), device


@pytest.mark.slow
def test_no_mask_is_copied():
    """Copies to the device are of tokens, positions and bits: no row of the context among them."""
    tokens, device = on_the_device(attention="dense")
    assert tokens == decoded_long(device="cpu", attention="dense")
    assert max(device.to_device) <= CHUNK * CHUNK  # bits of a chunk's rows
    assert set(device.waits) <= {"a copy to the host"}
