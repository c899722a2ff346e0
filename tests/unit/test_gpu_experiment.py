"""The measuring script of the GPU path: it runs from end to end without a GPU, and says so."""

from __future__ import annotations

import json

import pytest
import torch

from experiments.gpu.measure import SMOKE_NOTE, TABLES, main
from experiments.gpu.passes import NODE_COUNTS
from experiments.gpu.shapes import LLAMA3_8B, SMOKE_DRAFT, SMOKE_TARGET, random_llama
from experiments.gpu.strategies import REPLAYED, TRAINED
from specdec.models.quantize import num_bytes


@pytest.mark.slow
def test_smoke_run(tmp_path):
    """Every section gives rows, every figure that is missing has a reason, the label is there."""
    assert main(["--smoke", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["problems"] == []
    assert found["note"] == SMOKE_NOTE
    assert SMOKE_NOTE in (tmp_path / "gpu.md").read_text()
    assert found["provenance"]["versions"]["torch"] == torch.__version__
    assert [row["nodes"] for row in found["passes"]] == [*NODE_COUNTS] * 2
    assert all(row["ms"] > 0 and row["bandwidth_share"] > 0 for row in found["passes"])
    for row in found["kernels"]:
        assert (row["us"] is None) == bool(row["skipped"]), row
        assert row.get("difference", 0.0) < 1e-4, row  # all sides compute the same
    rows = {(row["pair"], row["strategy"]): row for row in found["strategies"]}
    replayed = {key: row for key, row in rows.items() if row["acceptances"] == "replayed"}
    assert {name for _, name in replayed} == {*REPLAYED, "staged"}
    assert {name for pair, name in rows if pair == "bundled"} == set(TRAINED)
    for row in rows.values():
        assert row["skipped"] or row["tokens_per_s"] > 0, row
    lengths = {name: row.get("acceptance_length") for (_, name), row in replayed.items()}
    assert lengths["ar"] == 1.0
    assert lengths["best_first"] > 1.2  # random weights alone would accept nothing
    assert all(set(columns) <= set(found[name][0]) for name, columns in TABLES.items())


def test_bytes_of_a_pass_are_the_models():
    """Counted bytes against the parameters of a model: all but the embedding's other rows."""
    for shape in (SMOKE_TARGET, SMOKE_DRAFT):
        model = random_llama(shape, device="cpu", dtype=torch.float32, positions=32)
        embedding = 0 if shape.tied else shape.vocab * shape.hidden * 4
        assert shape.weight_bytes(4) == num_bytes(model) - embedding
    assert 14.9e9 < LLAMA3_8B.weight_bytes(2) < 15.1e9
    assert LLAMA3_8B.cache_bytes(1000, 2) == 2 * 32 * 8 * 128 * 1000 * 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_only_smoke_runs(capsys):
    assert main([]) == 2
    assert "only --smoke runs here" in capsys.readouterr().err
