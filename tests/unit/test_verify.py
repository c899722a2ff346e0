"""``specdec verify``: its reference, its distances, its report and its command.

What it finds is in test_verify_faults.py and in tests/planted.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from specdec.certify import Check, Report
from specdec.certify.cases import Case, Decoded, letters
from specdec.certify.certify import certify
from specdec.certify.laws import OPPOSED_TABLE, TARGET_TABLE
from specdec.certify.oracle import (
    Oracle,
    differences,
    distance,
    plain_decode,
    processed,
    reference_probs,
    reference_token,
)
from specdec.cli.main import main
from specdec.compose.workbench import Parts, Workbench
from specdec.config.job import run_job_of
from specdec.errors import UserError
from specdec.interfaces import Verifier
from specdec.pairs import RandomPair
from specdec.policies import Chain
from specdec.sampling.transform import SamplingParams
from specdec.sources import DraftModelSource
from specdec.state import StopRules
from specdec.testing import assert_lossless_parts
from specdec.types import Lossless
from specdec.verifiers import MatchVerifier
from strategies.medusa import TypicalVerifier
from tests.laws import chi_square, pair_laws

PARAMS = {
    "t=1": SamplingParams(temperature=1.0),
    "top_k": SamplingParams(temperature=0.7, top_k=4),
    "top_p": SamplingParams(temperature=1.4, top_p=0.7),
    "both": SamplingParams(temperature=0.8, top_k=6, top_p=0.9),
    "greedy": SamplingParams(),
}

SMALL_MODEL = ("model.hidden_size=32", "model.num_layers=2", "model.vocab_size=32")


def config(*overrides: str) -> dict:
    return run_job_of(["model=random", *overrides]).config


# The reference.


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_reference_bans_repeated_ngrams(size: int) -> None:
    """A token is banned if it would complete an n-gram that the history has already."""
    rng = np.random.default_rng(size)
    for length in (1, 2, 5, 30):
        history = rng.integers(0, 5, length).tolist()
        logits = rng.normal(size=5)
        got = processed(logits, SamplingParams(no_repeat_ngram=size), history)
        grams = [history[i : i + size] for i in range(length - size + 1)]
        banned = [
            [*history, token][-size:] in grams if length >= size - 1 else False
            for token in range(5)
        ]
        np.testing.assert_array_equal(got, np.where(banned, -np.inf, logits))


def test_the_reference_decodes_as_transformers_does() -> None:
    pair = RandomPair(num_layers=2, draft_layers=1, vocab_size=32, max_positions=64)
    prompt = (3, 1, 4)
    case = Case(0, "", prompt, SamplingParams(), StopRules(max_new_tokens=12))
    found = Oracle(pair.target, seed=0).decode(case)
    expected = pair.target.generate(
        torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None
    )
    assert list(found.output) == expected[0, 3:].tolist()
    assert found.reason == "length"


def test_the_reference_stops_by_the_whole_text() -> None:
    follow = {1: 2, 2: 3, 3: 4, 4: 5, 5: 1}

    def logits(tokens: tuple[int, ...]) -> np.ndarray:
        return np.eye(6)[follow[tokens[-1]]]

    text = letters([2, 3, 4])
    stop = StopRules(max_new_tokens=9, stop_strings=(text[1:5],), decode=letters)
    case = Case(0, "", (1,), SamplingParams(), stop)
    assert plain_decode(logits, case, 0).output == (2, 3, 4)
    case = replace(case, stop=StopRules(max_new_tokens=9, eos_ids=frozenset([3])))
    assert plain_decode(logits, case, 0).reason == "eos"


# Laws and distances.


def test_chi_square_is_that_of_scipy_and_finds_a_bias() -> None:
    table = np.stack([reference_probs(np.array(row), PARAMS["t=1"]) for row in TARGET_TABLE])
    law = next(pair_laws(table, 0, 2))
    counts = np.random.default_rng(1).multinomial(5000, law)
    assert chi_square(counts, law) == pytest.approx(stats.chisquare(counts, law * 5000).pvalue)
    other = np.stack([reference_probs(np.array(row), PARAMS["t=1"]) for row in OPPOSED_TABLE])
    assert chi_square(counts, next(pair_laws(other, 0, 2))) < 1e-6
    impossible = np.where(np.arange(len(law)) == 3, 0.0, law)
    assert chi_square(counts, impossible / impossible.sum()) == 0.0


def test_the_laws_of_pairs_are_those_of_the_chain() -> None:
    table = np.array([[0.5, 0.5], [0.1, 0.9]])
    first, second = pair_laws(table, 0, 3)
    np.testing.assert_allclose(first, [0.25, 0.25, 0.05, 0.45])
    np.testing.assert_allclose(second, [0.15, 0.15, 0.07, 0.63])


def test_distances_tell_a_tie_from_a_fault() -> None:
    logits = np.array([1.0, 3.0, 2.9999, 0.0])
    gap = distance(logits, SamplingParams(), 0.0, token=2, error=1e-4)
    assert gap.kind == "top-two gap"
    assert gap.is_tie
    assert not distance(logits, SamplingParams(), 0.0, token=0, error=1e-4).is_tie
    params = SamplingParams(temperature=1.0)
    edge = float(reference_probs(logits, params)[0])
    assert distance(logits, params, edge + 1e-6, token=0, error=1e-4).is_tie
    far = distance(logits, params, edge + 0.1, token=0, error=1e-4)
    assert (far.kind, far.is_tie) == ("CDF edge", False)
    assert not distance(logits, params, edge + 0.1, token=0, error=0.01).is_tie
    best = replace(params, top_k=1)  # rounding may put token 2 in the place of token 1
    assert distance(logits, best, 0.9, token=2, error=1e-4).is_tie
    assert not distance(logits, best, 0.9, token=2, error=1e-6).is_tie
    assert not distance(logits, best, 0.9, token=0, error=1e-4).is_tie
    nucleus = replace(params, top_p=float(reference_probs(logits, params)[1]) - 1e-6)
    assert distance(logits, nucleus, 0.9, token=2, error=1e-4).is_tie
    assert not distance(logits, nucleus, 0.9, token=3, error=1e-4).is_tie


def test_rounding_within_the_error_is_always_a_tie() -> None:
    """Whatever moves every logit by at most the error gives a token that counts as a tie."""
    rng = np.random.default_rng(2)
    error, moved, allowed = 0.05, 0, 0
    for trial in range(400):
        logits = rng.normal(size=12)
        params = list(PARAMS.values())[trial % len(PARAMS)]
        draw = float(rng.random())
        plain = reference_token(logits, params, draw)
        other = reference_token(logits + rng.uniform(-error, error, 12), params, draw)
        if other != plain:
            moved += 1
            assert distance(logits, params, draw, other, error).is_tie
        allowed += distance(logits, params, draw, int(rng.integers(12)), error).is_tie
        drawn = reference_token(
            logits + rng.uniform(-error, error, 12), params, float(rng.random())
        )
        case = Case(0, "", (1,), params, StopRules(max_new_tokens=1))
        errors, one = np.array([error]), Decoded((drawn,), "length", origins=(-1,))
        found = differences(case, one, logits[None], seed=0, errors=errors, tokens=params.greedy)
        assert all(each.is_tie for each in found), "another draw may be on the other side"
    assert moved > 5
    assert allowed < 200, "a test that allows everything finds nothing"


# The report.


def test_a_report_says_what_may_be_said() -> None:
    good, bad = Check("a", True, "x"), Check("b", False, "y")
    skipped = Check("c", None, "z")
    report = Report("s", Lossless.TOKEN, (good, skipped))
    assert report.lossless
    assert "token for token" in report.verdict
    report = Report("s", Lossless.DISTRIBUTION, (good, bad))
    assert not report.lossless
    assert report.failed == ("b",)
    assert "b failed" in report.verdict
    lossy = Report("s", Lossless.LOSSY, (good,))
    assert not lossy.lossless
    assert "lossy" in lossy.verdict


@pytest.mark.slow
def test_the_command_certifies_and_stores(tmp_path: Path, capsys) -> None:
    """All checks, of plain decoding; ``record_results.py`` certifies a strategy with drafts."""
    folder = tmp_path / "out"
    words = ["verify", "strategy=ar", "model=random", *SMALL_MODEL, f"output_dir={folder}"]
    assert main(words) == 0
    stored = json.loads((folder / "verify.json").read_text("utf-8"))
    assert stored["lossless"] is True
    skipped = {c["name"] for c in stored["checks"] if c["passed"] is None}
    assert skipped == {"distribution", "exact_dtype"}
    assert "lossless token for token" in capsys.readouterr().out


@pytest.mark.slow
def test_several_presets_are_certified_and_only_failures_again(
    tmp_path: Path, capsys, monkeypatch
) -> None:
    certified: list[str] = []

    def certify(config, **_) -> Report:
        name = config["strategy"]["name"]
        certified.append(name)
        if name == "pearl":
            raise UserError("no draft")
        good = name != "suffix" or certified.count(name) > 1
        return Report(name, Lossless.TOKEN, (Check("greedy_parity", good, ""),))

    monkeypatch.setattr("specdec.certify.certify.certify", certify)
    words = ["verify", "strategies=[ar,suffix]", "model=random", f"output_dir={tmp_path / 'all'}"]
    assert main(words) == 1
    assert "1 of 2 are lossless" in capsys.readouterr().out
    assert main(words) == 0
    assert certified == ["ar", "suffix", "suffix"]
    assert json.loads((tmp_path / "all/suffix/verify.json").read_text())["lossless"]
    assert main([*words, "sampling=t08"]) == 2  # the folder has other certificates
    assert "another configuration" in capsys.readouterr().err
    words = ["verify", "strategies=[pearl,ar]", "model=random", f"output_dir={tmp_path / 'two'}"]
    assert main(words) == 2
    said = capsys.readouterr()
    assert "strategy=pearl was not checked: no draft" in said.err
    assert "1 of 2 are lossless" in said.out


@pytest.mark.slow
def test_a_lossy_verifier_is_said_to_be() -> None:
    words = config("strategy=speculative", "policy.gamma=2", "verifier=typical")
    report = certify(words, checks=["distribution"])
    assert not report.lossless
    assert "total variation" in report.checks[0].detail
    assert "lossy" in report.verdict


# Specdec.testing.


@pytest.mark.slow
def test_parts_made_in_python_are_certified() -> None:
    def with_verifier(verifier: type[Verifier]) -> Callable[[Workbench], Parts]:
        return lambda bench: bench.parts(
            source=DraftModelSource(runner=bench.draft_runner()),
            policy=Chain(gamma=2),
            verifier=verifier(),
        )

    assert_lossless_parts(with_verifier(MatchVerifier), checks=["greedy_parity", "tree_invariant"])
    with pytest.raises(AssertionError, match="lossy"):
        assert_lossless_parts(with_verifier(TypicalVerifier), checks=["tree_invariant"])
