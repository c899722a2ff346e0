"""Ranks capture what they can before a run whose time is measured, and nothing within it."""

from __future__ import annotations

import json
from pathlib import Path
from weakref import WeakSet

import pytest

from specdec.config.job import run_job_of
from specdec.distributed import rank_groups
from specdec.distributed.group import RankGroup
from specdec.distributed.messages import Kind
from specdec.kernels import graphs
from specdec.runs.jobs import run_job
from tests.distributed.processes import OVERRIDES

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


class _Silent:
    def phase(self, label: str, total: int | None) -> None:
        """Not of interest."""

    def advance(self, count: int = 1, detail: str = "") -> None:
        """Not of interest."""

    def note(self, text: str) -> None:
        """Not of interest."""


@pytest.mark.parametrize("mode", ["replay", "off"])
def test_ranks_are_told(mode: str, tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Each prompt is a timed run, before which rank 0 waits until both ranks have captured."""
    # Without the groups of other tests, which would be used here and are not observed.
    monkeypatch.setattr(graphs, "_observers", WeakSet())
    monkeypatch.setattr(rank_groups, "_local", {})
    told: list[tuple[Kind, list[int]]] = []
    send = RankGroup.send

    def observed(self, packed, ranks):
        ranks = list(ranks)
        if packed[1] in (Kind.BEGIN_TIMED, Kind.END_TIMED):
            told.append((Kind(packed[1]), ranks))
        send(self, packed, ranks)

    monkeypatch.setattr(RankGroup, "send", observed)
    words = [*OVERRIDES, f"model.graphs={mode}", "data.limit=2", "max_new_tokens=6"]
    run_job(run_job_of(words).config, tmp_path, _Silent())
    lines = (tmp_path / "requests.jsonl").read_text(encoding="utf-8").splitlines()
    assert {len(json.loads(line)["output"]) for line in lines} == {6}
    # Two prompts; more runs where a busy machine had them measured again.
    num_runs = len(told) // 2
    assert told == [(Kind.BEGIN_TIMED, [1, 2]), (Kind.END_TIMED, [1, 2])] * num_runs
    assert num_runs >= 2 if mode == "replay" else num_runs == 0
