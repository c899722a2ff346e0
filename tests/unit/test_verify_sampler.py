"""The certificate's check of the target's sampler, and of draws out of order; each with faults."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from specdec.certify.certify import certify
from specdec.certify.parity import draw_problems
from specdec.config.job import run_job_of
from specdec.sampling import transform
from specdec.sampling.keyed_draws import KeyedDraws

pytestmark = pytest.mark.slow


def _low_half_of_the_seed(honest: Any) -> Any:
    return lambda self, *key: honest(KeyedDraws(seed=self.seed & 0xFFFFFFFF), *key)


def _short_rows(honest: Any) -> Any:
    """Tokens behind the last whole block of a large vocabulary are never drawn."""

    def inverse_cdf(weights: Any, uniforms: Any) -> Any:
        whole = weights.shape[1] // 64 * 64 if weights.shape[1] > 256 else weights.shape[1]
        return honest(np.ascontiguousarray(weights[:, :whole]), uniforms)

    return inverse_cdf


def _shared_scores(_honest: Any) -> Any:
    """Processors get the model's own logits to write into."""

    def apply_processors(given: Any, logits: Any, histories: Any) -> Any:
        rows = []
        for row, history in zip(logits, histories, strict=True):
            scores = row[None]
            for processor in given:
                scores = processor(torch.from_numpy(history)[None], scores)
            rows.append(scores)
        return torch.cat(rows)

    return apply_processors


@pytest.mark.parametrize(
    ("owner", "name", "fault", "message"),
    [
        (KeyedDraws, "uniform", _low_half_of_the_seed, "t=1, 61 logits, 6 tokens"),
        (transform, "inverse_cdf", _short_rows, "1000 logits"),
        (transform, "apply_processors", _shared_scores, "greedy, two processors"),
    ],
)
def test_faults_are_found(
    owner: Any,
    name: str,
    fault: Callable[[Any], Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("specdec.certify.sampler.VOCAB_SIZES", (61, 1000))
    monkeypatch.setattr(owner, name, fault(getattr(owner, name)))
    config = run_job_of(["model=random", "strategy=ar"]).config
    (check,) = certify(config, checks=["sampler"]).checks
    assert check.passed is False
    assert message in check.detail


def test_draws_of_earlier_positions_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that goes back by more than a table, as after a miss below a deep tree."""
    honest, highest = KeyedDraws.uniform, dict[Any, int]()
    assert list(draw_problems(KeyedDraws(seed=5), 41, 640)) == []

    def forward_only(self, prompt_id, positions, purpose, index=0):  # type: ignore[no-untyped-def]
        key = (prompt_id, purpose)
        highest[key] = max(highest.get(key, 0), int(positions.max()))
        late = positions + (positions < highest[key] - 256)
        return honest(self, prompt_id, late, purpose, index)

    monkeypatch.setattr(KeyedDraws, "uniform", forward_only)
    assert len(list(draw_problems(KeyedDraws(seed=5), 41, 640))) == 4, "one per purpose"
