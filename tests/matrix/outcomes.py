"""What became of every cell: exact, right in distribution, labelled lossy, or refused."""

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from typing import Any

from specdec.errors import UserError
from specdec.parts.build import build_part
from specdec.types import Lossless
from tests.matrix.cells import (
    MAX_NEW_TOKENS,
    NUM_STAGES,
    PROMPTS,
    Cell,
    cell_of_parts,
    composing_pair,
    config,
    cover,
    decode,
    fast_cells,
    is_lossy,
    option,
    plain,
    possible,
    runner,
)

_SHORTEST_REASON = 40  # characters; a refusal says why and what to do


class Kind(StrEnum):
    """What was found; by value, as the support page prints it.

    ``EXACT``: every token equals plain decoding. ``DISTRIBUTION``: the verifier claims equality in
    distribution only; its output is the same on every executor, alone and in a batch, and is one
    that the target can sample (``tests/unit/test_verifiers.py`` and ``specdec verify`` test the
    distribution itself). ``LOSSY``: says so, and ends where it should. ``REFUSED``: at composition.
    """

    EXACT = "exact"
    DISTRIBUTION = "distribution"
    LOSSY = "lossy"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One cell's result.

    Attributes:
        reason: why it was refused, empty otherwise.
    """

    cell: Cell
    kind: Kind
    reason: str = ""


def composed(cell: Cell) -> Outcome:
    """Only composes the cell: refused, or what it has to show when it runs."""
    claims, reason = _claims(replace(cell, sampling="greedy"))
    if claims is None:
        return Outcome(cell, Kind.REFUSED, reason)
    if claims is Lossless.LOSSY:
        return Outcome(cell, Kind.LOSSY)
    greedy = option("sampling", cell.sampling)["temperature"] == 0.0
    exact = claims is Lossless.TOKEN or greedy
    return Outcome(cell, Kind.EXACT if exact else Kind.DISTRIBUTION)


@cache
def _claims(cell: Cell) -> tuple[Lossless | None, str]:
    """What the composed parts promise, or None and why they are refused.

    Once for all samplings: a strategy is composed without a look at them.
    """
    try:
        ready = runner(config(cell), composing_pair())
    except UserError as error:
        return None, " ".join(str(error).split())
    ready.close()
    return ready.claims, ""


def runs(cell: Cell) -> bool:
    """Whether the cell is not refused."""
    return composed(cell).kind is not Kind.REFUSED


@cache
def decoded_cells() -> frozenset[Cell]:
    """The fast cells, and a sample of the combinations that run, with one sampling each.

    In the lossless ones every source meets every policy, and each of them every executor under
    every verifier, where they meet at all. Of the lossy ones, whose output proves little, there are
    enough for every source, every policy, and every verifier on every executor.
    """
    chosen = [cell for cell in fast_cells() if runs(cell)]
    for lossy, meetings in ((False, _met_by_lossless), (True, _met_by_lossy)):
        met = {each for c in chosen if is_lossy(c.verifier) is lossy for each in meetings(c)}
        found = [c for c in cell_of_parts() if is_lossy(c.verifier) is lossy]
        chosen += cover(found, meetings, runs, met)
    return fast_cells().union(chosen)


def _met_by_lossless(cell: Cell) -> set[Any]:
    rule = cell.verifier, cell.executor
    return {(cell.source, cell.policy), (cell.source, *rule), (*rule, cell.policy)}


def _met_by_lossy(cell: Cell) -> set[Any]:
    return {("source", cell.source), ("policy", cell.policy), (cell.verifier, cell.executor)}


def decide(cell: Cell) -> Outcome:
    """Composes one cell and asserts that it is refused with a reason, and where it has to be."""
    outcome = composed(cell)
    if outcome.kind is Kind.REFUSED:
        assert len(outcome.reason) >= _SHORTEST_REASON, f"{cell}: refused without a reason"
    else:
        assert not biased(cell), f"{cell} must be refused: its rejection test would be biased"
    return outcome


def check(cell: Cell, *, transport: str = "in_process", stages: int = NUM_STAGES) -> Outcome:
    """Runs one cell and asserts what its kind promises. The models are float64: parity is exact."""
    outcome = decide(cell)
    if outcome.kind is Kind.REFUSED:
        return outcome
    outputs = decode(runner(config(cell, transport=transport, stages=stages)))
    assert set(outputs) == {prompt.id for prompt in PROMPTS}, f"{cell}: a prompt was lost"
    assert {len(v) for v in outputs.values()} == {MAX_NEW_TOKENS}, f"{cell}: wrong length"
    if outcome.kind is Kind.EXACT:
        assert outputs == plain(cell.sampling), f"{cell}: differs from plain decoding"
    elif outcome.kind is Kind.DISTRIBUTION:
        on_one = replace(cell, executor="local")
        # Exits come from executors of their own. A policy that feeds while answers are awaited has
        # proposed more on a pipeline by the time of a verdict, so other draws decide there.
        at_once = 1
        if composed(on_one).kind is Kind.REFUSED or not _is_serial(cell.policy):
            on_one = cell
            # With so few stages a request submits nothing while it waits for its turn.
            at_once = len(PROMPTS) if stages <= len(PROMPTS) else 1
        assert outputs == _on_one_device(on_one, stages, at_once), (
            f"{cell}: differs from the same parts on one device, {at_once} at a time"
        )
        for prompt in PROMPTS:
            assert possible(cell.sampling, prompt, outputs[prompt.id]), (
                f"{cell}: a token that the target cannot sample"
            )
    return outcome


def biased(cell: Cell) -> bool:
    """Rejection among children that were chosen by value: wrong, whatever the messages say."""
    return _rejects(cell.verifier) and _chooses_by_value(cell.policy)


@cache
def _rejects(verifier: str) -> bool:
    part = build_part(option("verifier", verifier), {}, "verifier")
    return bool(part.needs.draft_probs)


@cache
def _chooses_by_value(policy: str) -> bool:
    return bool(build_part(option("policy", policy), {}, "policy").value_dependent)


@cache
def _is_serial(policy: str) -> bool:
    return bool(build_part(option("policy", policy), {}, "policy").serial)


@cache
def _on_one_device(cell: Cell, stages: int, at_once: int) -> dict[int, tuple[int, ...]]:
    values = config(cell, stages=stages)
    values["batch_size"] = at_once
    return decode(runner(values))
