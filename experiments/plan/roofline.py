"""Fits the constants of ``specdec.planning.machines`` to published pass times.

    python -m experiments.plan.roofline

reads extracted/pass_times.csv of the acceptance traces (SPECDEC_DATA), fits the constants to all
series of 16-bit weights on a named GPU, and states the error on models that a fit does not see:
each model is held out once, on all machines. A series is a model on a machine.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from specdec.data.files import data_folder
from specdec.planning.machines import CONSTANTS, Constants, pass_ms

FILE = "acceptance_traces/extracted/pass_times.csv"

GPUS = {  # GB/s and dense 16-bit TFLOP/s of the vendors' data sheets
    "A100 PCIE": (1935.0, 312.0),
    "A100 SXM": (2039.0, 312.0),
    "A100-80GB SXM": (2039.0, 312.0),
    "A100": (1555.0, 312.0),
    "H100 PCIE": (2000.0, 756.0),
    "RTX 4090": (1008.0, 165.0),
    "L40": (864.0, 181.0),
    "GH200": (4000.0, 990.0),
}
MODELS = {  # billions of parameters, layers, kilobytes of keys and values per token
    "Llama-68M": (0.068, 2, 6.0),
    "Sheared-LLaMA-2.7B": (2.7, 32, 328.0),
    "Llama-2-7B": (6.74, 32, 524.0),
    "Qwen2.5-7B-Instruct": (7.62, 28, 57.0),
    "Apertus-1.5-8B": (8.05, 32, 131.0),
    "Llama-2-13B": (13.0, 40, 819.0),
    "Qwen2.5-14B-Instruct": (14.8, 48, 197.0),
    "Vicuna-33B": (32.5, 60, 1597.0),
    "Llama-2-70B": (69.0, 80, 328.0),
    "Apertus-1.5-70B": (70.6, 80, 328.0),
}
_MOST_ROWS = 512  # larger passes are prefills
_GRID = {
    "memory_share": (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95),
    "flop_share": (0.3, 0.4, 0.5, 0.6, 0.7, 0.8),
    "layer_ms": (0.0, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1),
    "eager_layer_ms": (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3),
    "reduce_ms": (0.0, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15),
}


@dataclass(frozen=True, slots=True)
class Timed:
    """A published pass time; ``sizes`` are the arguments of ``pass_ms``."""

    series: str
    ms: float
    rows: int
    sizes: Mapping[str, Any]

    def predicted(self, constants: Constants) -> float:
        return pass_ms(self.rows, **self.sizes, constants=constants)


def read_times(path: Path) -> list[Timed]:
    """The rows that can be used: 16-bit weights, a named GPU, a known model, no pipeline."""
    table = pd.read_csv(path, dtype=str, keep_default_na=False)
    found = []
    for row in table.to_dict("records"):
        machine = re.fullmatch(r"(\d+)x (.+?)(?: TP(\d+))?", row["hardware"])
        if machine is None or machine[2] not in GPUS or row["model"] not in MODELS:
            continue
        if int(row["rows"]) > _MOST_ROWS or "INFERRED" in row["note"]:
            continue
        billions, layers, kv_kb = MODELS[row["model"]]
        speed, flops = GPUS[machine[2]]
        requests = int(row["rows"]) if "concurrency" in row["note"] else 1
        sizes = {
            "parameters": 1e9 * billions,
            "num_bytes": 2e9 * billions + 1e3 * kv_kb * _context(row["context"]) * requests,
            "layers": layers,
            "bytes_per_s": 1e9 * speed,
            "flops_per_s": 1e12 * flops,
            "degree": int(machine[3] or 1),
            "eager": row["engine"].startswith("HF"),
        }
        series = " ".join(row[key] for key in ("source", "model", "hardware", "engine"))
        found.append(Timed(series, float(row["ms"]), int(row["rows"]), sizes))
    return found


def _context(text: str) -> float:
    """Tokens of context; 0 where the source does not say."""
    kilo = re.search(r"([\d.]+)k$", text)
    if kilo:
        return 1024.0 * float(kilo[1])
    return float(text) if text.isdecimal() else 0.0


def fitted(times: Sequence[Timed]) -> Constants:
    """Constants of the least mean absolute log error, every series alike: by coordinates."""
    counts = Counter(timed.series for timed in times)
    weights = np.array([1.0 / counts[timed.series] for timed in times])

    def loss(constants: Constants) -> float:
        return float(np.average(np.abs(log_errors(times, constants)), weights=weights))

    best = CONSTANTS
    for _ in range(4):
        before = best
        for name, values in _GRID.items():
            best = min((replace(best, **{name: value}) for value in values), key=loss)
        if best == before:
            break
    return best


def log_errors(times: Sequence[Timed], constants: Constants) -> np.ndarray:
    """float64[N]: log of predicted over published."""
    return np.array([np.log(timed.predicted(constants) / timed.ms) for timed in times])


def held_out(times: Sequence[Timed]) -> dict[str, np.ndarray]:
    """Series -> log errors under constants that are fitted without its model on any machine."""
    models = {timed.sizes["parameters"] for timed in times}
    unseen = {m: fitted([t for t in times if t.sizes["parameters"] != m]) for m in models}
    errors: dict[str, list[np.ndarray]] = {}
    for timed in times:
        found = log_errors([timed], unseen[timed.sizes["parameters"]])
        errors.setdefault(timed.series, []).append(found)
    return {series: np.concatenate(of) for series, of in errors.items()}


def main() -> None:
    times = read_times(data_folder(name="pass times", places=FILE) / FILE)
    series = len({timed.series for timed in times})
    constants = fitted(times)
    print(f"{len(times)} pass times in {series} series")
    for name in _GRID:
        print(f"  {name}: {getattr(constants, name):g}")
    errors = held_out(times)
    for name, values in errors.items():
        low, high = 100 * np.expm1(values.min()), 100 * np.expm1(values.max())
        source, *what = name.split()
        short = source.partition("@")[0].rpartition("/")[2]
        print(f"  {short} {' '.join(what)}: {low:+.0f} % to {high:+.0f} %")
    each = np.array([np.abs(values).mean() for values in errors.values()])
    every = np.abs(np.concatenate(list(errors.values())))
    for label, values in (("series", each), ("pass times", every)):
        cells = [f"{100 * np.expm1(np.quantile(values, q)):.0f} %" for q in (0.5, 0.75, 0.9)]
        print(f"held-out error over {label}: median, 75 % and 90 % below {', '.join(cells)}")


if __name__ == "__main__":
    main()
