"""Models fitted to the published acceptance logs under SPECDEC_DATA predict other lengths."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from scipy.special import expit, logit

from specdec.fitting import (
    AcceptanceLog,
    AcceptanceModel,
    ReadOptions,
    fit_logs,
    fit_tail,
    read_log,
    tail_of,
)
from specdec.fitting.estimate import measured, predicted
from specdec.fitting.model import rank_vector
from specdec.fitting.requests import with_draft_tokens

TRACES = Path(os.environ.get("SPECDEC_DATA", "")) / "acceptance_traces"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not os.environ.get("SPECDEC_DATA") or not TRACES.is_dir(),
        reason="SPECDEC_DATA names no folder with acceptance_traces",
    ),
]

PAIR = "pipespec/chain_Llama-3.2-1B-Instruct-Llama-3.1-8B-Instruct_{}.json.gz"
OTHER_LENGTHS = (2, 5, 11, 16, 20)

SHIPPED = sorted((Path(__file__).parents[2] / "conf/model").glob("law_*.yaml"))


def models_of(option: dict[str, Any]) -> tuple[np.ndarray, list[AcceptanceModel]]:
    """The shares of groups of prompts, and the model of each."""
    default = {"stay": [0.0] * len(option["top1"]), "depth": [0.0]}
    values = {key: np.array({**default, **option}[key]) for key in (*default, "top1")}
    weights = np.array(option.get("group_weights", [option["weights"]]))
    models = [AcceptanceModel(weights=row / row.sum(), **values) for row in weights]
    return np.array(option.get("group_shares", [1.0])), models


def stated(path: Path) -> tuple[AcceptanceLog, dict[str, Any]]:
    """The log that a shipped model is of, and its keys."""
    text = path.read_text()
    lines = re.findall(r"^# (.*)", text, re.MULTILINE)
    start = next(at for at, line in enumerate(lines) if line.startswith("specdec fit"))
    words = shlex.split(" ".join(line for line in lines[start:] if "passes verified" not in line))
    given = dict(word.split("=", 1) for word in words[3:])
    draft_tokens = int(given["draft_tokens"]) if "draft_tokens" in given else None
    options = ReadOptions(method=given.get("method"), draft_tokens=draft_tokens)
    return read_log(TRACES / words[2], options), yaml.safe_load(text)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_models_are_within_3_percent_of_their_data(path: Path) -> None:
    """Tokens per pass of logs, or the hit rate of rank vectors."""
    log, option = stated(path)
    shares, models = models_of(option)
    if log.vector is not None:
        assert shares @ [model.hit_rate() for model in models] == pytest.approx(
            log.vector.shares[0], rel=0.03
        )
    else:
        requests = with_draft_tokens(log)
        passes_per_token = [1.0 / predicted(model, requests) for model in models]
        wanted = pytest.approx(measured(requests)[0], rel=0.03)
        assert 1.0 / (shares @ passes_per_token) == wanted


def test_chains_of_length_8_predict_lengths_2_to_20() -> None:
    """Within 3 % at every length (k rows have k - 1 draft tokens), and on held-out prompts."""
    checks = [read_log(TRACES / PAIR.format(k)) for k in OTHER_LENGTHS]
    fitted = fit_logs([read_log(TRACES / PAIR.format(8))], checks=checks)
    errors = {k: c.error for k, c in zip(OTHER_LENGTHS, fitted.checks, strict=True)}
    assert max(map(abs, errors.values())) < 0.03, errors
    assert fitted.held_out is not None
    assert abs(fitted.held_out.error) < 0.05 or fitted.held_out.is_inside


def test_tails_are_those_of_the_rank_vectors() -> None:
    """The constants of ``tail_of`` come from the 16 vectors, and describe each within 4 ranks."""
    table = pd.read_csv(TRACES / "extracted" / "rank_vectors.csv")
    shares = table.filter(regex=r"r\d+").fillna(0.0).to_numpy()
    vectors = [rank_vector("", row, miss) for row, miss in zip(shares, table["miss"], strict=True)]
    tails = [fit_tail(vector) for vector in vectors]
    rates = np.clip([vector.shares[0] for vector in vectors], 0.005, 0.995)
    misses = np.clip([tail.miss for tail in tails], 0.005, 0.995)
    decay = np.polynomial.Polynomial.fit(logit(rates), [tail.decay for tail in tails], 1)
    miss = np.polynomial.Polynomial.fit(logit(rates), logit(misses), 1)
    for rate in (0.5, 0.7, 0.9):
        tail = tail_of(rate)
        assert tail.decay == pytest.approx(decay(logit(rate)), abs=0.01)
        assert tail.miss == pytest.approx(expit(miss(logit(rate))), abs=0.01)
    for vector in vectors:
        rate = float(vector.shares[0])
        within4 = rate + (1 - rate) * tail_of(rate).shares()[:3].sum()
        assert within4 == pytest.approx(vector.shares[:4].sum(), abs=0.035)
