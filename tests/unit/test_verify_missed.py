"""``specdec verify`` finds faults that small models, short requests and small tables do not show.

Each test plants one fault and runs the check that finds it; the unchanged code passes the same
check (the controls are shared by the tests of a configuration).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from specdec.attention.kv_cache import TreeCache
from specdec.certify import Check, certify
from specdec.config.job import run_job_of
from specdec.policies import chain
from specdec.sampling import host
from specdec.state import StopRules
from specdec.verifiers import rejection
from tests.sampled import sampled

REJECTION = ("strategy=speculative", "verifier=rejection", "sampling=t08")


def outcome(name: str, overrides: tuple[str, ...]) -> Check:
    """The outcome of one check."""
    cfg = run_job_of(["model=random", *overrides]).config
    (check,) = certify(cfg, checks=[name]).checks
    return check


sound = cache(outcome)
"""The same of the unchanged code: called before anything is planted."""


# ---------------------------------------------------------------------- laws


def few_candidates(limit: float) -> Callable[[Any], Any]:
    """Candidates below a probability are not used."""

    def make(_: Any) -> Any:
        def take(tree: Any, tail: Any) -> Any:
            columns = np.flatnonzero(tree.candidate_logprobs[tail[0]] > np.log(limit))
            return tree.take(tail, columns[:1]) if len(columns) else chain.NO_SLOTS

        return take

    return make


def clamped_draft(least: float) -> Callable[[Any], Any]:
    """The acceptance test takes the draft's probability as ``least`` where it is smaller."""

    class Clamped(np.ndarray):
        def __getitem__(self, at: Any) -> Any:
            value = np.asarray(super().__getitem__(at))
            return np.maximum(value, least) if isinstance(at, int) else value

    def make(honest: Any) -> Any:
        return lambda probs: honest(probs).view(Clamped)

    return make


def unscaled_draw(_: Any) -> Any:
    """The draw is not scaled to what is left of a distribution."""

    def first_above(cdf: Any, uniforms: Any) -> Any:
        column = (cdf > uniforms[:, None]).argmax(axis=1)
        before = cdf[np.arange(len(column)), np.maximum(column - 1, 0)]
        return column, uniforms - np.where(column > 0, before, 0.0)

    return first_above


def whole_draw_in_a_block(honest: Any) -> Any:
    """The second level of a CDF gets the draw without what the blocks before it take."""

    def first_above(cdf: Any, uniforms: Any) -> Any:
        return honest(cdf, uniforms)[0], uniforms * cdf[:, -1]

    return first_above


def short_last_block(honest: Any) -> Any:
    """Entries after the last full block are never drawn."""

    def inverse_cdf(weights: Any, uniforms: Any) -> Any:
        full = weights.shape[1] // 64 * 64
        return honest(weights[:, :full] if full > 256 else weights, uniforms)

    return inverse_cdf


def unnormalised_residual(_: Any) -> Any:
    """The next sibling is tested against what is left of the target, not normalised."""

    def residual(target: Any, draft: Any) -> Any:
        rest = np.maximum(target - draft, 0.0)
        return rest if rest.sum() > 0.0 else target

    return residual


LAW_FAULTS: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "candidates below 0.05": (chain, "_take_first", few_candidates(0.05)),
    "candidates below 0.0001": (chain, "_take_first", few_candidates(1e-4)),
    "draft clamped at 0.01": (rejection, "on_host", clamped_draft(1e-2)),
    "draft clamped at 0.0003": (rejection, "on_host", clamped_draft(3e-4)),
    "CDF of a remainder": (host, "_first_above", unscaled_draw),
    "second level of a CDF": (host, "_first_above", whole_draw_in_a_block),
    "last block of a CDF": (host, "inverse_cdf", short_last_block),
    "residual not normalised": (rejection, "_residual", unnormalised_residual),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", LAW_FAULTS)
def test_a_biased_law_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, make = LAW_FAULTS[name]
    assert sound("distribution", REJECTION).passed
    monkeypatch.setattr(owner, attribute, make(getattr(owner, attribute)))
    check = outcome("distribution", REJECTION)
    assert check.passed is False, check
    assert "times as probable under another law" in check.detail


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(["second level of a CDF", "last block of a CDF"], every=2))
def test_faults_of_long_rows_are_found_token_by_token(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of small vocabularies are summed in one go."""
    owner, attribute, make = LAW_FAULTS[name]
    assert sound("sampled_parity", ("strategy=speculative",)).passed
    monkeypatch.setattr(owner, attribute, make(getattr(owner, attribute)))
    check = outcome("sampled_parity", ("strategy=speculative",))
    assert check.passed is False
    assert check.detail.startswith("wide draft, "), "the small vocabularies do not show it"


# ---------------------------------------------------------------------- sliding windows


def slots_as_positions(_: Any) -> Any:
    """Entries are taken to lie at the positions of their slots."""
    return lambda self, end: np.arange(end)


def positions_stay(honest: Any) -> Any:
    """Entries that move get the position of the entry that was in their slot."""

    def move(self: Any, sources: Any, targets: Any, lo: int, hi: int) -> None:
        positions = self._positions.copy()
        honest(self, sources, targets, lo, hi)
        self._positions = positions

    return move


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "family", "name", "make"),
    [
        ("specinfer", "mistral", "key_positions", slots_as_positions),
        ("best_first", "gemma2", "key_positions", slots_as_positions),
        ("specpipe", "mistral", "_move", positions_stay),
    ],
)
def test_wrong_key_positions_are_found(
    strategy: str, family: str, name: str, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a cache computes is wrong only with a window shorter than the sequences."""
    words = (f"strategy={strategy}", f"model.family={family}")
    assert sound("cache_invariant", words).passed
    monkeypatch.setattr(TreeCache, name, make(getattr(TreeCache, name)))
    check = outcome("cache_invariant", words)
    assert check.passed is False
    assert name == "_move" or "with a sliding window of" in check.detail


# ---------------------------------------------------------------------- stop strings


@pytest.mark.slow
def test_stop_strings_that_must_end_a_token_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop string counts only where the text of the output ends with it."""
    words = ("strategy=speculative",)
    assert sound("stop_rules", words).passed

    def reason(self: StopRules, output: Any) -> str | None:
        if output[-1] in self.eos_ids:
            return "eos"
        if self.decode is not None and self.decode(output).endswith(self.stop_strings):
            return "stop_string"
        return "length" if len(output) >= self.max_new_tokens else None

    monkeypatch.setattr(StopRules, "reason", reason)
    check = outcome("stop_rules", words)
    assert check.passed is False
    assert "that ends inside output token" in check.detail


@pytest.mark.exhaustive
def test_stop_strings_looked_for_in_one_token_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the text of the last two tokens is searched."""
    words = ("strategy=speculative",)
    assert sound("stop_rules", words).passed
    honest = StopRules.reason

    def reason(self: StopRules, output: Any) -> str | None:
        found = honest(self, output)
        if found == "stop_string":
            tail = "" if self.decode is None else self.decode(output[-2:])
            return found if any(s in tail for s in self.stop_strings) else None
        return found

    monkeypatch.setattr(StopRules, "reason", reason)
    check = outcome("stop_rules", words)
    assert check.passed is False
