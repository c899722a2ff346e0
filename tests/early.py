"""Checks of early hidden states that the tests of several executors share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch

from specdec.certify.cases import Case
from specdec.certify.subject import decode_steps
from specdec.compose.planned import Planned
from specdec.compose.workbench import Parts, Workbench
from specdec.models.slicing import final_norm
from specdec.state import DecodeState
from specdec.types import Batch, EarlyHidden, HiddenName, Output
from specdec.verifiers import MatchVerifier
from tests import toys
from tests.toys import EarlyLens, LevelWhenKnown

TOLERANCE = 1e-12
"""Of a state of size 1 in float64: only the order of summation differs."""

MIDDLE = HiddenName(1)


def composed(bench: Workbench, executor: Planned, *, name: HiddenName = MIDDLE) -> Parts:
    """Levels of proposals from a middle layer."""
    return bench.parts(
        source=EarlyLens(toys.pair(), name=name),
        policy=LevelWhenKnown(width=3, children=3),
        verifier=MatchVerifier(),
        executor=executor,
    )


@cache
def _fresh(tokens: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """[T, E] after the embedding and after every layer, by transformers' own forward."""
    model = toys.pair().target
    found: list[torch.Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda _, args, out: found.append(_rows(out)))
        for layer in model.get_decoder().layers
    ]
    with torch.inference_mode():
        model(torch.tensor([tokens]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return tuple(found)


def _rows(out: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    return (out if isinstance(out, torch.Tensor) else out[0])[0].clone()


@dataclass
class Arrivals:
    """What arrived early.

    Attributes:
        delays: steps from a node's submission to the arrival of its state, as often as counted.
        prompt_delays: the same of prompt chunks.
        waits: steps from the arrival of a node's state to its answer.
        compared: states compared with fresh forwards.
        error: largest difference.
    """

    delays: set[int] = field(default_factory=set)
    prompt_delays: set[int] = field(default_factory=set)
    waits: set[int] = field(default_factory=set)
    compared: int = 0
    error: float = 0.0


class _Watcher:
    """Compares what leaves an executor, by ``collect`` or ``poll``."""

    def __init__(self, parts: Parts, state: DecodeState) -> None:
        self.seen = Arrivals()
        self._state = state
        self._name = parts.source.needs.early_hidden[0]
        self._sent: dict[tuple[int, int], int] = {}
        self._came: dict[tuple[int, int], int] = {}
        executor: Any = parts.executor
        self._submit, self._collect = executor.submit, executor.collect
        executor.submit, executor.collect = self.submit, self.collect
        self._poll, executor.poll = executor.poll, self.poll

    def submit(self, batch: Batch) -> None:
        for chunk in batch.prefills:
            self._sent[chunk.request, chunk.start] = batch.step
        self._submit(batch)

    def collect(self, *, wait: bool = True) -> Output:
        output: Output = self._collect(wait=wait)
        self._note(output)
        return output

    def poll(self) -> Output | None:
        output: Output | None = self._poll()
        if output is not None:
            self._note(output)
        return output

    def _note(self, output: Output) -> None:
        for early in output.early:
            self._note_nodes(early, output.step)
        for answers in output.answers:
            for node_id in answers.node_ids.tolist():
                self.seen.waits.add(output.step - self._came[answers.request, node_id])
        for chunk in output.prompts:
            tokens = self._state.requests[chunk.request].tokens[: chunk.last_position + 1]
            self.seen.prompt_delays.add(output.step - self._sent[chunk.request, chunk.start])
            self._compare(chunk.hidden[self._name], tokens, slice(chunk.start, None))

    def _note_nodes(self, early: EarlyHidden, step: int) -> None:
        request = self._state.requests[early.request]
        slots = request.tree.slots(early.node_ids).tolist()
        for row, (node_id, slot) in enumerate(zip(early.node_ids.tolist(), slots, strict=True)):
            assert slot >= 0, "pruned rows are not computed"
            assert (early.request, node_id) not in self._came, "a state arrives once"
            self._came[early.request, node_id] = step
            self.seen.delays.add(step - int(request.tree.submitted_at[slot]))
            state = early.hidden[self._name][row][None]
            self._compare(state, request.path_tokens(slot), slice(-1, None))

    def _compare(self, given: torch.Tensor, tokens: np.ndarray, rows: slice) -> None:
        fresh = _fresh(tuple(tokens.tolist()))[self._name.layer][rows]
        if self._name.normed:
            with torch.inference_mode():
                fresh = final_norm(toys.pair().target)(fresh)
        assert given.shape == fresh.shape
        assert given.dtype == torch.float64
        self.seen.error = max(self.seen.error, float((given - fresh).abs().max()))
        self.seen.compared += len(given)


def run(parts: Parts, wanted: Sequence[Case], *, batch_size: int, prefill_chunk: int) -> Arrivals:
    """Decodes cases, asserts that outputs are plain decoding's, and compares early states."""
    outputs: dict[int, Any] = {}
    state = parts.new_state()
    watcher = _Watcher(parts, state)
    steps = decode_steps(
        parts,
        wanted,
        outputs,
        batch_size=batch_size,
        prefill_chunk=prefill_chunk,
        state=state,
    )
    for _ in steps:
        pass
    toys.assert_plain(outputs, wanted)
    source = parts.source
    assert isinstance(source, EarlyLens)
    for case in wanted:
        positions = [
            at
            for chunk in source.prompts[case.id]
            for at in range(chunk.start, chunk.last_position + 1)
        ]
        assert positions == list(range(len(case.prompt) - 1)), "the last token is the first root"
    return watcher.seen
