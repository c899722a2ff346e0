"""wandb, offline: what a run's folder holds is logged, and nothing asks for a network."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from specdec.cli.loggers import log_results
from tests.distributed.processes import wait_until
from tests.unit.test_results import comparison, config_of  # noqa: F401 - a fixture


@pytest.mark.slow
def test_wandb_logs_offline(
    comparison: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # the discard port: nobody answers
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = {"kind": "wandb", "project": "specdec", "mode": "offline"}
    found = json.loads((comparison / "comparison.json").read_text(encoding="utf-8"))
    row = found["rows"][1]
    log_results([config_of("speculative", logger=logger)], [row], comparison)
    (run,) = (comparison / "wandb").glob("offline-run-*")
    (log,) = run.glob("*.wandb")
    # wandb's own process may write the last records after finish() has returned.
    wait_until(lambda: logged(log.read_bytes(), "speedup_wall"), "wandb's summary")
    raw = log.read_bytes()
    assert float(logged(raw, "speedup_wall")[-1]) == pytest.approx(2.0)
    assert float(logged(raw, "tokens_per_s")[-1]) == pytest.approx(20.0)
    assert logged(raw, "lossless") == [b"true"]
    assert set(logged(raw, "prompts_done")) == {b"1", b"2"}
    assert b"2" in logged(raw, "curve/path_lengths")
    assert b"DraftModelSource" in raw, "the configuration is with it"


def logged(raw: bytes, name: str) -> list[bytes]:
    """The JSON values that follow a key in wandb's log (protobuf: field 16, a string)."""
    pattern = rb"(?<![/\w])" + re.escape(name).encode() + rb"\x82\x01.([-+.e0-9]+|true|false)"
    return re.findall(pattern, raw, re.DOTALL)
