"""wandb, offline: what a run's folder holds is logged, and nothing asks for a network."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from specdec.cli.loggers import log_results
from specdec.trace.rejections import Judgement
from tests.distributed.processes import wait_until
from tests.unit.test_results import comparison, config_of  # noqa: F401 - a fixture

JUDGED = (
    Judgement(rank=1, candidates=2, in_tree=True),
    Judgement(rank=0, candidates=2, in_tree=False),
)


@pytest.mark.slow
def test_wandb_logs_offline(
    comparison: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # the discard port: nobody answers
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = {"kind": "wandb", "project": "specdec", "mode": "offline"}
    lines = (comparison / "requests.jsonl").read_text(encoding="utf-8").splitlines()
    named = [json.dumps({**json.loads(line), "prompt": "set/0"}) + "\n" for line in lines]
    (comparison / "requests.jsonl").write_text("".join(named), encoding="utf-8")
    judged = [one.row() for one in JUDGED]
    trees = {"requests": [{"steps": [{"commit": {"judged": judged}}]}]}
    (comparison / "trees.json").write_text(json.dumps(trees), encoding="utf-8")
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
    assert float(logged(raw, "domain/set/drafted_share")[-1]) == pytest.approx(0.4)
    assert float(logged(raw, "rejections/share_accepted")[-1]) == pytest.approx(0.5)
    assert logged(raw, "prompt/drafted_share_so_far")


def logged(raw: bytes, name: str) -> list[bytes]:
    """The JSON values that follow a key in wandb's log (protobuf: field 16, a string)."""
    pattern = rb"(?<![/\w])" + re.escape(name).encode() + rb"\x82\x01.([-+.e0-9]+|true|false)"
    return re.findall(pattern, raw, re.DOTALL)
