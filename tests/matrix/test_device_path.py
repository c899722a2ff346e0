"""Decoding where logits lie on an accelerator: only a few numbers come back.

That they give the host's tokens is in tests/unit/test_sampling.py and tests/emulated.

The accelerator is the CPU under another name: the selection on a device's tensors runs on ordinary
ones. What a real device would have to wait for is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specdec.pairs import build_pair
from specdec.runs.runners import PartsRunner
from specdec.sampling import transform as sampling
from specdec.state import StopRules
from tests.matrix.cells import (
    MAX_NEW_TOKENS,
    Cell,
    config,
    decode,
)

VOCABULARY = 1000
SPARE = sampling.SPARE
SELECTED = 2 * (80 + SPARE)  # of a row with ``t06``
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique_dim", "_unique2", "bincount")
"""Operations whose result's value or shape the host has to wait for."""

STRATEGIES = {
    "ar": ("none", "root_only", "match"),
    "speculative": ("draft_model", "chain", "match"),
    "best_first": ("draft_model", "best_first", "match"),
    "specinfer": ("draft_model", "static", "rejection"),
}

pytestmark = pytest.mark.slow


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> None:
    """All logits count as logits on an accelerator."""
    monkeypatch.setattr(sampling, "on_accelerator", lambda tensor: True)


class Copies(TorchDispatchMode):
    """Counts what comes to the host.

    Attributes:
        sizes: elements of every tensor that was turned into an array, a list or a number.
        waits: operations that wait for a device by themselves.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        masked = name in ("index", "index_put_") and any(
            isinstance(at, torch.Tensor) and at.dtype == torch.bool for at in args[1]
        )
        if masked or name in WAITS:
            self.waits[name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[Copies]:
    copies = Copies()

    def counting(method):
        def call(tensor, *args, **kwargs):
            copies.sizes.append(tensor.numel())
            return method(tensor, *args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch, copies:
        for name in ("numpy", "tolist", "__array__"):
            patch.setattr(torch.Tensor, name, counting(getattr(torch.Tensor, name)))
        yield copies


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize("sampling_name", ["greedy", "t06"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_few_numbers_come_back(strategy: str, sampling_name: str) -> None:
    """Of every row the entries that may count, with their ids; of greedy requests one entry.

    Only with rejection, greedy requests need distributions, which no top-k limits.
    """
    copies, num_candidates, ready = _copies(strategy, sampling_name)
    made, draft = ready.parts.executor.counters, ready.parts.source.counters
    rejects, greedy = STRATEGIES[strategy][2] == "rejection", sampling_name == "greedy"
    whole = VOCABULARY * (greedy and rejects)
    answered = 2 + whole if greedy else SELECTED
    drafted = whole or (SELECTED if rejects else 2 * (num_candidates + SPARE))
    assert 0 < sum(copies.sizes) <= answered * made.rows + drafted * draft.rows
    # A node whose logits are stored is expanded without a pass.
    assert len(copies.sizes) <= (1 + bool(whole)) * made.passes + 2 * draft.passes
    assert not copies.waits


@pytest.mark.parametrize("strategy", ["ar", "specinfer"])
def test_the_hosts_path_would_bring_whole_rows(strategy: str) -> None:
    """The control: the same count where numpy samples."""
    copies, _, ready = _copies(strategy, "t08")
    assert sum(copies.sizes) >= VOCABULARY * ready.parts.executor.counters.rows


def _copies(strategy: str, sampling_name: str) -> tuple[Copies, int, PartsRunner]:
    """(what came back in a whole run, candidates per row of a draft, the run's parts)."""
    source, policy, verifier = STRATEGIES[strategy]
    values = config(Cell(source, policy, verifier, "local", sampling_name))
    values["model"]["vocab_size"] = VOCABULARY
    stop = StopRules(max_new_tokens=MAX_NEW_TOKENS)
    ready = PartsRunner(cfg=values, pair=build_pair(values["model"]), stop=stop)
    widths = [int(source != "none")]  # one in chains that the source drafts in one call
    with counted() as copies, pytest.MonkeyPatch.context() as patch:
        if source != "none":
            expand = ready.parts.source.expand

            def watched(state, nodes, k):
                widths.append(k)
                return expand(state, nodes, k)

            patch.setattr(ready.parts.source, "expand", watched)
        decode(ready)
    return copies, max(widths), ready
