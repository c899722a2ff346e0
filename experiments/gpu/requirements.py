"""Required figures of the GPU path, and whether a run of ``experiments.gpu.measure`` meets them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from operator import itemgetter
from typing import Any

from experiments.gpu.shapes import LLAMA3_1B, LLAMA3_3B, LLAMA3_8B

Result = Mapping[str, Any]
BANDWIDTH_SHARES = {LLAMA3_8B.name: 0.70, LLAMA3_3B.name: 0.60, LLAMA3_1B.name: 0.50}
WIDER_PASSES = {8: 1.05, 32: 1.15}
ATTENTION_CONTEXTS = (500, 1000, 4000)
BEST_SPEEDUP = 3.16
MOST_OVERHEAD = 0.05
LIMIT_S = 480.0


def verdicts(result: Result) -> list[dict[str, Any]]:
    """A row per requirement: required and measured value, "met", "missed" or "not measured".

    Args:
        result: content of ``gpu.json``, possibly incomplete. Those of a smoke run do not count.
    """
    rows = []
    for name, sign, required, values in _requirements(result):
        worst = (min if sign == ">=" else max)(values, default=None)
        verdict = "not measured"
        if worst is not None:
            met = worst >= required if sign == ">=" else worst <= required
            verdict = "met" if met else "missed"
        if result.get("smoke"):
            verdict = f"smoke run: does not count ({verdict})"
        rows.append(
            {"bar": name, "wanted": f"{sign} {required:g}", "found": worst, "verdict": verdict}
        )
    return rows


def _requirements(result: Result) -> Iterator[tuple[str, str, float, list[float]]]:
    """(name, sign, required value, every measured value that must meet it)."""
    passes, kernels = result.get("passes", []), result.get("kernels", [])
    context = min((row["context"] for row in passes), default=0)
    for shape, share in BANDWIDTH_SHARES.items():
        of_shape = [r for r in passes if r["shape"] == shape and r["context"] == context]
        ones = [r["bandwidth_share"] for r in of_shape if r["nodes"] == 1]
        yield f"{shape}: share of the copy bandwidth, one-node pass", ">=", share, ones
        for nodes, limit in WIDER_PASSES.items():
            wider = [r["over_one_node"] for r in of_shape if r["nodes"] == nodes]
            yield f"{shape}: {nodes} nodes over one", "<=", limit, wider
    replayed = [r for r in result.get("strategies", []) if r["acceptances"] == "replayed"]
    yield "llama3-8b: share of the copy bandwidth, `ar`", ">=", 0.70, _ar_share(result, replayed)
    for context in ATTENTION_CONTEXTS:
        rows = [r for r in kernels if r["kernel"] == "tree attention" and r["context"] == context]
        side = "sdpa, dense mask"
        yield f"tree attention at {context}: {side} over ours", ">=", 1.5, _over(rows, side)
    rows = [r for r in kernels if r["kernel"] == "swiglu"]
    yield "fused SwiGLU: best alternative over ours", ">=", 1.0, _over(rows)
    sides = [r for r in replayed if r["strategy"] != "ar" and r.get("speedup")]
    best = sorted(sides, key=itemgetter("speedup"))[-1:]
    where = f"replayed acceptances: {best[0]['strategy'] if best else 'best strategy'}"
    yield f"{where} over `ar`", ">=", BEST_SPEEDUP, [row["speedup"] for row in best]
    yield f"{where}, overhead share", "<=", MOST_OVERHEAD, [r["overhead_share"] for r in best]
    wall_s = result.get("wall_s")
    yield "seconds of the script", "<=", LIMIT_S, [] if wall_s is None else [wall_s]


def _over(rows: Iterable[Result], side: str | None = None) -> list[float]:
    """Times of the alternatives over those of our kernel."""
    return [
        row["over_ours"]
        for row in rows
        if row.get("over_ours") and not row["side"].startswith("triton")
        if side is None or row["side"] == side
    ]


def _ar_share(result: Result, replayed: Iterable[Result]) -> list[float]:
    """Bytes of weights per second of plain decoding over the copy bandwidth."""
    rate = result.get("copy_bandwidth_gb_per_s")
    weights = LLAMA3_8B.weight_bytes(2)
    return [
        row["tokens_per_s_net"] * weights / (rate * 1e9)
        for row in replayed
        if rate and row["strategy"] == "ar" and row.get("tokens_per_s_net")
        if row["pair"].startswith(LLAMA3_8B.name)
    ]
