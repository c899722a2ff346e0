"""The measuring script of the GPU path: it runs from end to end without a GPU, and says so."""

import json

import pytest
import torch

from experiments.gpu.measure import SMOKE_NOTE, TABLES, main
from experiments.gpu.passes import NODE_COUNTS
from experiments.gpu.requirements import verdicts
from experiments.gpu.shapes import LLAMA3_8B, SMOKE_DRAFT, SMOKE_TARGET, random_llama
from experiments.gpu.strategies import REPLAYED, TRAINED
from specdec.models.packing import num_bytes


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
    for row in replayed.values():  # what the replay takes is known, and left out
        assert row["skipped"] or row["tokens_per_s_net"] > row["tokens_per_s"], row
    assert lengths["best_first"] > 1.2  # random weights alone would accept nothing
    assert all(set(columns) <= set(found[name][0]) for name, columns in TABLES.items())
    assert all("does not count" in row["verdict"] for row in found["bars"])


def test_verdicts():
    """Each bar against made-up figures on either side of it; what is missing is not measured."""
    assert {row["verdict"] for row in verdicts({})} == {"not measured"}
    passes = [
        {"shape": "llama3-8b", "context": 500, "nodes": n, "bandwidth_share": b, "over_one_node": o}
        for n, b, o in ((1, 0.71, 1.0), (8, 0.7, 1.04), (32, 0.6, 1.2))
    ]
    passes.append({**passes[0], "context": 16000, "bandwidth_share": 0.1})
    kernels = [
        {"kernel": "tree attention", "context": 500, "side": side, "over_ours": over}
        for side, over in (("triton (ours)", 1.0), ("sdpa, dense mask", 1.6), ("unfused", 0.3))
    ]
    kernels += [
        {"kernel": "swiglu", "context": None, "side": side, "over_ours": over}
        for side, over in (("triton (ours)", 1.0), ("torch, a", 1.3), ("torch, b", 0.9))
    ]
    about = {"pair": "llama3-8b/llama3-1b", "acceptances": "replayed"}
    strategies = [
        {**about, "strategy": "ar", "speedup": 1.0, "tokens_per_s_net": 150.0},
        {**about, "strategy": "best_first", "speedup": 3.2, "overhead_share": 0.08},
        {**about, "strategy": "staged", "skipped": "no text", "speedup": None},
    ]
    found = {"passes": passes, "kernels": kernels, "strategies": strategies, "wall_s": 400.0}
    rows = verdicts({**found, "copy_bandwidth_gb_per_s": 3000.0, "smoke": False})
    told = {row["bar"]: row["verdict"] for row in rows}
    assert told["llama3-8b: share of the copy bandwidth, one-node pass"] == "met"
    assert told["llama3-8b: 8 nodes over one"] == "met"
    assert told["llama3-8b: 32 nodes over one"] == "missed"
    assert told["llama3-1b: 8 nodes over one"] == "not measured"
    assert told["llama3-8b: share of the copy bandwidth, `ar`"] == "met"  # 150 x 15 GB / 3 TB
    assert told["tree attention at 500: sdpa, dense mask over ours"] == "met"
    assert told["fused SwiGLU: best alternative over ours"] == "missed"
    assert told["replayed acceptances: best_first over `ar`"] == "met"
    assert told["replayed acceptances: best_first, overhead share"] == "missed"
    assert told["seconds of the script"] == "met"


def test_bytes_of_a_pass_are_the_models():
    """Counted bytes against the parameters of a model: all but the embedding's other rows."""
    for shape in (SMOKE_TARGET, SMOKE_DRAFT):
        model = random_llama(shape, device="cpu", dtype=torch.float32, positions=32)
        embedding = 0 if shape.tied else shape.vocab * shape.hidden * 4
        assert shape.weight_bytes(4) == num_bytes(model) - embedding
    assert 14.9e9 < LLAMA3_8B.weight_bytes(2) < 15.1e9
    assert LLAMA3_8B.cache_bytes(1000, 2) == 2 * 32 * 8 * 128 * 1000 * 2
