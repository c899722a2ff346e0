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
from specdec.types import HiddenName, Output
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


def run(parts: Parts, wanted: Sequence[Case], *, batch_size: int, prefill_chunk: int) -> Arrivals:
    """Decodes cases, asserts that outputs are plain decoding's, and compares early states."""
    outputs: dict[int, Any] = {}
    seen, state = Arrivals(), parts.new_state()
    sent: dict[tuple[int, int], int] = {}
    came: dict[tuple[int, int], int] = {}
    executor, name = parts.executor, parts.source.needs.early_hidden[0]
    collect, submit = executor.collect, executor.submit

    def compare(given: torch.Tensor, tokens: np.ndarray, rows: slice) -> None:
        fresh = _fresh(tuple(tokens.tolist()))[name.layer][rows]
        if name.normed:
            with torch.inference_mode():
                fresh = final_norm(toys.pair().target)(fresh)
        assert given.shape == fresh.shape
        assert given.dtype == torch.float64
        seen.error = max(seen.error, float((given - fresh).abs().max()))
        seen.compared += len(given)

    def noting_submit(batch: Any) -> None:
        for chunk in batch.prefills:
            sent[chunk.request, chunk.start] = batch.step
        submit(batch)

    def noting_output(output: Output | None) -> None:
        if output is None:
            return
        for early in output.early:
            request = state.requests[early.request]
            slots = request.tree.slots(early.node_ids)
            for row, (node_id, slot) in enumerate(
                zip(early.node_ids.tolist(), slots.tolist(), strict=True)
            ):
                assert slot >= 0, "pruned rows are not computed"
                assert (early.request, node_id) not in came, "a state arrives once"
                came[early.request, node_id] = output.step
                seen.delays.add(output.step - int(request.tree.submitted_at[slot]))
                compare(early.hidden[name][row][None], request.path_tokens(slot), slice(-1, None))
        for answers in output.answers:
            for node_id in answers.node_ids.tolist():
                seen.waits.add(output.step - came[answers.request, node_id])
        for chunk in output.prompts:
            tokens = state.requests[chunk.request].tokens[: chunk.last_position + 1]
            seen.prompt_delays.add(output.step - sent[chunk.request, chunk.start])
            compare(chunk.hidden[name], tokens, slice(chunk.start, None))

    def noting_collect(*, wait: bool = True) -> Output:
        output = collect(wait=wait)
        noting_output(output)
        return output

    executor.collect, executor.submit = noting_collect, noting_submit  # type: ignore[method-assign]
    if (poll := getattr(executor, "poll", None)) is not None:

        def noting_poll() -> Output | None:
            output = poll()
            noting_output(output)
            return output  # type: ignore[no-any-return]

        executor.poll = noting_poll  # type: ignore[attr-defined]
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
    return seen
