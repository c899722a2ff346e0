"""Models fitted to the published acceptance logs under SPECDEC_DATA predict other lengths."""

import os
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from specdec.fitting import (
    AcceptanceLog,
    AcceptanceModel,
    ReadOptions,
    fit_logs,
    read_log,
    tail_of,
)
from specdec.fitting.estimate import measured, predicted
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

MODELS = sorted((Path(__file__).parents[2] / "conf/model").glob("law_*.yaml"))
SHIPPED = [path for path in MODELS if "fasthesse" not in path.stem]  # those are of ranks, not logs


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
    log, option = stated(path)
    shares, models = models_of(option)
    requests = with_draft_tokens(log)
    passes_per_token = [1.0 / predicted(model, requests) for model in models]
    assert 1.0 / (shares @ passes_per_token) == pytest.approx(measured(requests)[0], rel=0.03)


def test_chains_of_length_8_predict_lengths_2_to_20() -> None:
    """Within 3 % at every length (k rows have k - 1 draft tokens), and on held-out prompts."""
    checks = [read_log(TRACES / PAIR.format(k)) for k in OTHER_LENGTHS]
    fitted = fit_logs([read_log(TRACES / PAIR.format(8))], checks=checks)
    errors = {k: c.error for k, c in zip(OTHER_LENGTHS, fitted.checks, strict=True)}
    assert max(map(abs, errors.values())) < 0.03, errors
    assert fitted.held_out is not None
    assert abs(fitted.held_out.error) < 0.05 or fitted.held_out.is_inside


def test_tails_describe_published_ranks() -> None:
    """The regression of ``tail_of`` gives the share within 4 ranks of each of 16 vectors."""
    table = pd.read_csv(TRACES / "extracted" / "rank_vectors.csv")
    shares = table.filter(regex=r"r\d+").fillna(0.0).to_numpy()
    for rate, *others in shares / (shares.sum(axis=1) + table["miss"].to_numpy())[:, None]:
        within4 = rate + (1 - rate) * tail_of(rate).shares()[:3].sum()
        assert within4 == pytest.approx(rate + sum(others[:3]), abs=0.035)
