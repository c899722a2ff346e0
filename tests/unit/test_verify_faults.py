"""``specdec verify`` finds faults: one planted fault per way of looking.

One-line faults are in tests/planted/mutants.yaml.
"""

import re
import sys
import time
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from specdec.certify import Report, print_report
from specdec.certify.certify import certify
from specdec.cli.main import main
from specdec.errors import UserError
from specdec.interfaces import Events, TokenSource, TreePolicy
from specdec.policies import chain
from specdec.sampling import transform
from specdec.sampling.keyed_draws import KeyedDraws
from specdec.sources import Background, DraftModelSource
from specdec.state import DecodeState, StopRules
from specdec.testing import certify_parts
from specdec.tree import TokenTree
from specdec.types import Answers, BoolArray, Candidates, IntArray, Nodes
from specdec.verifiers import MatchVerifier
from tests.matrix.record_presets import PROFILE
from tests.unit.test_verify import config


def failed(report: Report, name: str) -> str:
    """The detail of the check that must have failed."""
    assert not report.lossless
    (check,) = [c for c in report.checks if c.name == name]
    assert check.passed is False, check
    return check.detail


@pytest.mark.slow
def test_draws_that_forget_the_prompt_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = KeyedDraws.uniform

    def shared(self, prompt_id, positions, purpose, index=0):  # type: ignore[no-untyped-def]
        return honest(self, 0, positions, purpose, index)

    monkeypatch.setattr(KeyedDraws, "uniform", shared)
    report = certify(config("strategy=prompt_lookup"), checks=["sampled_parity"])
    detail = failed(report, "sampled_parity")
    assert re.search(
        r"output token \d+ is \d+ from (source 0|the target) instead of \d+, CDF edge \d\.\de-\d",
        detail,
    ), detail


@pytest.mark.slow
def test_a_difference_says_who_proposed_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the two best tokens the second, where the draft proposes it."""
    honest = MatchVerifier.verify
    taken = list[tuple[int, int]]()

    def gullible(self, state, requests):  # type: ignore[no-untyped-def]
        for request in requests:
            tree = request.tree
            children = tree.children(0)
            if len(children) and not len(request.output):
                taken.append((int(tree.tokens[children[0]]), int(tree.answers[0])))
                tree.answers[0] = tree.tokens[children[0]]
        return honest(self, state, requests)

    monkeypatch.setattr(MatchVerifier, "verify", gullible)
    detail = failed(
        certify(config("strategy=speculative"), checks=["greedy_parity"]), "greedy_parity"
    )
    wrong, right = next(pair for pair in taken if pair[0] != pair[1])
    shown = f"output token 0 is {wrong} from source 0 instead of {right}, top-two gap "
    assert shown in detail
    assert float(detail.split(shown)[1].split(";")[0]) > 0.0


@pytest.mark.slow
def test_an_ignored_eos_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = StopRules.reason

    def deaf(self: StopRules, output: list[int]) -> str | None:
        reason = honest(self, output)
        return None if reason == "eos" and len(output) % 2 else reason

    monkeypatch.setattr(StopRules, "reason", deaf)
    report = certify(config("strategy=prompt_lookup"), checks=["stop_rules"])
    assert "EOS" in failed(report, "stop_rules")


def test_a_breakdown_is_a_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self, state, output):  # type: ignore[no-untyped-def]
        raise IndexError("planted")

    monkeypatch.setattr(MatchVerifier, "verify", broken)
    report = certify(config("strategy=speculative"), checks=["greedy_parity", "tree_invariant"])
    assert report.failed == ("greedy_parity", "tree_invariant")
    first, second = report.checks
    assert first.detail.startswith("raised IndexError: planted (verifier MatchVerifier.broken, ")
    assert second.detail == "ended by the error of greedy_parity"
    (crash,) = report.as_dict()["errors"]
    assert crash["checks"] == ("greedy_parity", "tree_invariant")
    assert crash["part"] == "verifier MatchVerifier.broken"
    assert (crash["request"], crash["step"]) == (11, 0)
    assert crash["traceback"].splitlines()[-1] == "IndexError: planted"
    assert 'raise IndexError("planted")' in crash["traceback"]


def test_what_hangs_is_a_failed_check_and_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once: every other check would hang too."""

    def endless(self, state, requests):  # type: ignore[no-untyped-def]
        while True:
            time.sleep(0.01)

    monkeypatch.setattr(MatchVerifier, "verify", endless)
    monkeypatch.setattr(sys.modules["specdec.certify.certify"], "_HANG_S", 1.0)
    report = certify(config("strategy=speculative"), checks=["greedy_parity", "stop_rules"])
    (check,) = report.checks
    assert check.passed is False
    assert check.detail.startswith("raised TimeoutError: no progress for 1 s (verifier ")


def test_a_breakdown_names_request_and_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a batch, from the frames of the part that raised."""
    honest = DraftModelSource.commit

    def broken(self, commits, output):  # type: ignore[no-untyped-def]
        for commit in commits:
            request_id = commit.request
            if request_id == 14 and commit.step == 4:
                raise KeyError(request_id)
        honest(self, commits, output)

    monkeypatch.setattr(DraftModelSource, "commit", broken)
    cfg = config("strategy=speculative", "batch_size=4")
    report = certify(cfg, checks=["greedy_parity"])
    (crash,) = report.errors
    assert (crash.part, crash.request) == ("source DraftModelSource.broken", 14)
    assert crash.step == 5, "commits end a step: the counter is at the next"
    console = Console(record=True, width=200, file=StringIO())
    print_report(report, {}, console)
    shown = " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
    assert shown.count("KeyError: 14 (source DraftModelSource.broken,") == 1
    assert "tracebacks are in verify.json" in shown


@pytest.mark.slow
@pytest.mark.parametrize("verifier", ["match", "rejection"])
def test_the_configured_law_shows_what_small_models_do_not(
    verifier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of the configured vocabulary alone, which no small model and no table has.

    With rejection its e-value is 6e16, where 4e7 are needed (36 tests, false-alarm rate 1e-6); with
    ``model.hidden_size=32`` it is only 2e5, since the target's law is flatter.
    """
    small = ("model.num_layers=2", "model.draft_layers=1", "policy.gamma=2")
    cfg = config("strategy=speculative", f"verifier={verifier}", "model.vocab_size=777", *small)
    (honest,) = certify(cfg, checks=["configured_law"]).checks
    assert honest.passed, honest
    original = transform._weights

    def cold(values: Any, temperature: float, *dtype: Any) -> Any:
        return original(values, temperature * (0.7 if values.shape[1] == 777 else 1.0), *dtype)

    monkeypatch.setattr(transform, "_weights", cold)
    others = ["sampler"] if verifier == "match" else []  # it does not depend on the verifier
    report = certify(cfg, checks=[*others, "configured_law"])
    assert report.failed == ("configured_law",), report.checks


# Answers and passes that come apart from their nodes.

SIMULATED = ("clock=simulated", f"clock.profile={PROFILE}")
QUICK = ["greedy_parity", "cache_invariant", "tree_invariant"]


def slots_of_gone(tree: TokenTree, ids: IntArray) -> tuple[BoolArray, IntArray]:
    """Which nodes have left the tree, and the slots where their ids would have been."""
    gone = tree.slots(ids) < 0
    return gone, tree.ids.searchsorted(ids[gone]).clip(max=len(tree) - 1)


def answers_of_pruned_nodes(original: Any, fired: list[int]) -> Any:
    """Are stored in the slots where their ids would have been."""

    def set_answers(self: TokenTree, answers: Answers) -> None:
        original(self, answers)
        gone, at = slots_of_gone(self, answers.node_ids)
        fired.append(len(at))
        self.answers[at], self.answered[at] = answers.tokens[gone], True

    return set_answers


def commits_during_a_pass_are_forgotten(original: Any, fired: list[int]) -> Any:
    def commit(self: Any, commits: Any, output: Any) -> None:
        if self._last is not None and not self._last.done():
            fired.append(len(commits))
        else:
            original(self, commits, output)

    return commit


def candidates_of_pruned_nodes(original: Any, fired: list[int]) -> Any:
    """Are stored in the slots where their ids would have been."""

    def set_candidates(self: DecodeState, nodes: Nodes, candidates: Candidates) -> None:
        original(self, nodes, candidates)
        for request_id, ids, rows in nodes.packed():
            if (request := self.requests.get(request_id)) is not None:
                gone, at = slots_of_gone(request.tree, ids)
                fired.append(len(at))
                part = candidates.take(rows.start + np.flatnonzero(gone))
                request.tree.set_candidates(at, part, slice(None))

    return set_candidates


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "owner", "name", "words"),
    [
        (answers_of_pruned_nodes, TokenTree, "set_answers", ("strategy=dsi", *SIMULATED)),
        (commits_during_a_pass_are_forgotten, Background, "commit", ("strategy=amusd",)),
        (
            candidates_of_pruned_nodes,
            DecodeState,
            "set_candidates",
            ("strategy=amusd", *SIMULATED),
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_comes_apart_from_its_node_is_found(
    fault: Callable[[Any, list[int]], Any],
    owner: Any,
    name: str,
    words: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Answers in any order, and passes that run beside the loop."""
    fired: list[int] = []
    monkeypatch.setattr(owner, name, fault(getattr(owner, name), fired))
    report = certify(config(*words), checks=QUICK, fail_fast=True)
    assert sum(fired), "the planted code had no effect"
    assert report.failed, report.as_dict()


# Long requests, last places.


@pytest.mark.slow
def test_nodes_beyond_the_last_position_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = chain.last_position
    monkeypatch.setattr(chain, "last_position", lambda request: honest(request) + 2)
    report = certify(config("strategy=speculative"), checks=["greedy_parity", "tree_invariant"])
    assert report.failed == ("tree_invariant",), "the output itself is right"
    assert "last_position" in failed(report, "tree_invariant")


class WithoutSelect(TreePolicy):
    """Lacks an abstract method."""

    value_dependent = False

    def overlap(self, state: DecodeState, source: TokenSource, events: Events) -> bool:
        return False


class WithoutBase:
    """Has all methods of a policy, but not its base class, whose defaults the loop reads."""

    value_dependent = False
    open = close = commit = overlap = select = lambda self, *given: None


def test_a_policy_without_select_is_refused(tmp_path: Path, capsys) -> None:
    """In a configuration, before anything runs."""
    target = f"~policy +policy._target_={__name__}.WithoutSelect".split()
    words = ["verify", "strategy=speculative", "model=random", *target]
    assert main([*words, f"output_dir={tmp_path / 'out'}"]) == 2
    assert "WithoutSelect is not a TreePolicy: it lacks select;" in capsys.readouterr().err


def test_a_policy_without_base_is_refused_in_python() -> None:
    with pytest.raises(UserError, match="WithoutBase is not a TreePolicy: name a class that"):
        certify_parts(
            lambda bench: bench.parts(
                source=DraftModelSource(runner=bench.draft_runner()),
                policy=WithoutBase(),  # type: ignore[arg-type]
                verifier=MatchVerifier(),
            )
        )
