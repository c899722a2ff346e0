"""Every combination of parts is lossless, labelled lossy, or refused with a reason."""

from __future__ import annotations

from collections import Counter

import pytest

from specdec.cli.tree import options
from specdec.errors import UserError
from specdec.types import Lossless
from tests.matrix.cells import PROMPTS, Cell, cells, config, executors, plain, run

PAIRS = [(source, policy) for source in options("source") for policy in options("policy")]


SYNTHETIC = ("synthetic",)  # needs model=synthetic
NO_DISTRIBUTION = ("prompt_lookup", "mixture")  # no exact draft distribution
VALUE_DEPENDENT = ("best_first", "fixed_width", "pipedec", "specpipe", "staged_tree")


def must_refuse(cell: Cell) -> bool:
    """Combinations that would be wrong: a biased rejection test."""
    biased = cell.policy in VALUE_DEPENDENT
    return cell.source in SYNTHETIC or (cell.verifier == "rejection" and biased)


def may_refuse(cell: Cell) -> bool:
    """Combinations that cannot be right; every other cell must run."""
    needs_cheap = cell.policy == "staged_tree" and cell.source != "staged"
    no_probs = cell.source in (*NO_DISTRIBUTION, "none")
    rejected = cell.verifier == "rejection" and (cell.policy in VALUE_DEPENDENT or no_probs)
    return cell.source in SYNTHETIC or needs_cheap or rejected


def check(cell: Cell) -> str:
    """Runs one cell; returns ran or refused. Parity is exact: the models are float64."""
    values = config(cell)
    try:
        outputs, runner = run(values)
    except UserError as error:
        reason = str(error)
    else:
        reason = None
    if reason is not None:
        assert may_refuse(cell), f"{cell} must run, but was refused: {reason}"
        assert len(reason) > 40, f"{cell}: a refusal must say why and what to do"
        return "refused"
    assert not must_refuse(cell), f"{cell} must be refused"
    expected = plain(cell.sampling)
    assert set(outputs) == {prompt.id for prompt in PROMPTS}, f"{cell}: a prompt was lost"
    exact = runner.claims is Lossless.TOKEN or (
        runner.claims is Lossless.DISTRIBUTION and values["sampling"]["temperature"] == 0.0
    )
    if exact:
        assert outputs == expected, f"{cell}: differs from plain decoding"
    else:
        assert {k: len(v) for k, v in outputs.items()} == {k: len(v) for k, v in expected.items()}
    return "ran"


@pytest.mark.parametrize(("source", "policy"), PAIRS)
def test_fast_half(source: str, policy: str) -> None:
    for cell in cells(source, policy):
        if cell.in_fast_half:
            check(cell)


@pytest.mark.slow
@pytest.mark.parametrize(("source", "policy"), PAIRS)
def test_every_cell(source: str, policy: str) -> None:
    results = Counter(check(cell) for cell in cells(source, policy))
    exact = len(executors()) * len(options("sampling"))
    assert results.total() >= 2 * exact, "no cell may be skipped silently"
    assert results["ran"] >= exact or source in SYNTHETIC or policy == "staged_tree"


def test_the_matrix_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verifier that drops accepted tokens must be caught, or the matrix proves nothing."""
    from dataclasses import replace

    from specdec.verifiers import MatchVerifier

    original = MatchVerifier.verify

    def drops_one(self, state, output):  # type: ignore[no-untyped-def]
        return [replace(v, accepted_ids=v.accepted_ids[:-1]) for v in original(self, state, output)]

    monkeypatch.setattr(MatchVerifier, "verify", drops_one)
    with pytest.raises(AssertionError, match=r"differs from plain decoding|never be answered"):
        check(Cell("draft_model", "chain", "match", "local", "greedy"))
