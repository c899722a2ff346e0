"""Every combination of parts is lossless, labelled lossy, or refused with a reason.

Every cell is composed here, which decides its kind. Decoded are, of those that run, a sample in
which every option meets every other one, and a larger one: every source meets every policy there,
and each of them every executor under every lossless verifier. All of them under all samplings:
``pytest -m exhaustive tests/matrix``, or ``make support``.
"""

from dataclasses import replace
from itertools import combinations
from operator import attrgetter
from pathlib import Path

import pytest

from specdec.config.options import options
from specdec.verifiers import MatchVerifier
from tests.matrix.cells import AXES, Cell, all_cells, cells, fast_cells, is_lossy
from tests.matrix.outcomes import check, decide, decoded_cells, runs
from tests.matrix.support import PAGE, page, survey

PAIRS = [(source, policy) for source in options("source") for policy in options("policy")]
# Of these pairs, the fast tests decode those that have every source and every policy.
FAST = [
    pytest.param(*pair, marks=() if {*pair} & {"draft_model", "chain"} else pytest.mark.slow)
    for pair in PAIRS
]

pytestmark = pytest.mark.xdist_group("matrix")  # a process composes each cell once


@pytest.mark.parametrize(("source", "policy"), FAST)
def test_fast_half(source: str, policy: str) -> None:
    for cell in cells(source, policy):
        if cell in fast_cells():
            check(cell)


@pytest.mark.slow
@pytest.mark.parametrize(("source", "policy"), PAIRS)
def test_every_combination_of_parts(source: str, policy: str) -> None:
    for cell in cells(source, policy):
        examine = check if cell in decoded_cells() else decide
        if cell not in fast_cells():
            examine(cell)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("source", "policy"), PAIRS)
def test_every_other_cell(source: str, policy: str) -> None:
    for cell in cells(source, policy):
        if cell not in decoded_cells():
            check(cell)


def test_every_option_meets_every_other_in_the_fast_half() -> None:
    for one, other in combinations(AXES, 2):
        met = {(getattr(c, one), getattr(c, other)) for c in all_cells()}
        fast = {(getattr(c, one), getattr(c, other)) for c in fast_cells()}
        assert fast == met, f"{one} x {other} in the fast half"


@pytest.mark.slow
@pytest.mark.parametrize("lossy", [False, True])
def test_parts_that_can_be_together_are_decoded_together(lossy: bool) -> None:
    cells = {replace(c, sampling="greedy") for c in all_cells() if is_lossy(c.verifier) is lossy}
    running = {c for c in cells if runs(c)}
    decoded = running & {replace(c, sampling="greedy") for c in decoded_cells()}
    assert 0 < len(decoded) < len(running)
    together = ("source policy", "source verifier executor", "policy verifier executor")
    if lossy:
        together = ("source", "policy", "verifier executor")
    for axes in together:
        met = attrgetter(*axes.split())
        assert {met(c) for c in running} == {met(c) for c in decoded}, axes


@pytest.mark.slow
def test_the_support_page_is_what_a_run_writes() -> None:
    """Composes every cell; what the page says about those that run, `make support` holds of all."""
    assert Path(PAGE).read_text(encoding="utf-8") == page(survey()), (
        "docs/support.md differs from what the parts in conf/ do now: run `make support`"
    )


def test_the_matrix_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verifier that drops accepted tokens must be caught, or the matrix proves nothing."""
    original = MatchVerifier.verify

    def drops_one(self, state, output):  # type: ignore[no-untyped-def]
        return [replace(v, accepted_ids=v.accepted_ids[:-1]) for v in original(self, state, output)]

    monkeypatch.setattr(MatchVerifier, "verify", drops_one)
    with pytest.raises(AssertionError, match=r"differs from plain decoding|never be answered"):
        check(Cell("draft_model", "chain", "match", "local", "t08"))
