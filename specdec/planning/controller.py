"""Fits the controller's own time on this machine, which profiles leave out, to real runs.

A simulated clock charges passes of models alone. A real step also selects nodes, packs rows, draws
and judges tokens and moves cache entries, which costs time per pass, per request and per row. The
measured time of short runs of a few presets and sizes, minus the simulated time of the same runs,
is modelled as a linear combination of these counts. Its coefficients (least squares, at least 0)
are added to the cost curves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, combinations
from typing import Any

import numpy as np

from specdec.clocks.profile import CostCurve
from specdec.planning.acceptance import OfRecord
from specdec.planning.layouts import Layout
from specdec.planning.measuring import ModelsHere
from specdec.planning.simulate import Candidate, Simulator, Unit

PROBES: Sequence[tuple[str, Mapping[str, Any]]] = (
    ("ar", {}),
    ("speculative", {"gamma": 2}),
    ("speculative", {"gamma": 6}),
    ("best_first", {"bs": 8, "w": 1, "d": 2}),
    ("best_first", {}),
    ("fixed_width", {"width": 4, "depth": 3}),
)
"""Presets and sizes to run: few and many rows, and few and many draft passes per target pass."""

_UNITS = 4
_ROUNDS = 3
_TOLD_MS = 0.0005
_KINDS = {"stage": "target", "draft": "draft"}


def with_controller(
    costs: Mapping[str, Any],
    *,
    models: ModelsHere,
    acceptance: OfRecord,
    batch: int,
    length: int,
) -> tuple[dict[str, Any], str]:
    """Adds the controller's time to costs measured on one device; also returns a note on it.

    ``acceptance`` must be the record of the models' prompts. ``length`` is in tokens per prompt.
    """
    configs = [models.config(name, sizes) for name, sizes in PROBES]
    prompts = len(acceptance.record.requests)
    count = min(_UNITS, max(prompts // batch, 1))
    models.progress.phase("measuring the controller", len(configs) * count * _ROUNDS)
    real = models.decode(
        configs,
        batch=batch,
        count=count,
        length=length,
        rounds=_ROUNDS,
        on_turn=models.progress.advance,
    )
    simulator = Simulator(acceptance.pair(), None, of="controller", prompts=prompts)

    def seconds(priced: Mapping[str, Any]) -> np.ndarray:
        """Returns float64[P], the simulated time of every probe under these costs."""
        found = []
        for (name, _), config in zip(PROBES, configs, strict=True):
            clock = {"kind": "simulated", "profile": "measured", "scale": 1.0, "costs": priced}
            played = {**config, "batch_size": batch, "clock": clock}
            made = Candidate(name=name, layout=Layout(), config=played)
            found.append(_seconds(simulator.units(made, count, length), batch))
        return np.array(found)

    measured = np.array([_seconds(units, batch) for units in real])
    bases = [(kind, what) for kind in _KINDS if kind in costs for what in _shapes(batch)]
    counts = np.stack([seconds({kind: _curve(what, batch)}) for kind, what in bases], axis=1)
    added = fitted(counts, measured - seconds(costs), measured)
    changed = {kind: dict(curve) for kind, curve in costs.items()}
    for (kind, what), ms in zip(bases, added, strict=True):
        shape, curve = CostCurve.of(_curve(what, batch)), changed[kind]
        more = [ms * shape(rows) for rows in curve["tokens"]]
        changed[kind] = {**curve, "ms": [a + b for a, b in zip(curve["ms"], more, strict=True)]}
    return changed, _note(bases, added)


def fitted(counts: np.ndarray, missing: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """Returns float64[B], milliseconds per count, at least 0, that minimise the relative errors.

    Args:
        counts: float64[P, B], thousands of each count in each run.
        missing: float64[P], seconds of each run that are to be explained.
        whole: float64[P], seconds of each run.
    """
    scaled, wanted = counts / whole[:, None], missing / whole
    num = counts.shape[1]
    found, least = np.zeros(num), float(wanted @ wanted)
    # There are at most six unknowns, so every choice of those above 0 can be tried.
    for chosen in chain.from_iterable(combinations(range(num), n) for n in range(1, num + 1)):
        columns = scaled[:, chosen]
        values = np.linalg.lstsq(columns, wanted)[0]
        left = wanted - columns @ values
        if (values >= 0.0).all() and float(left @ left) < least:
            found, least = np.zeros(num), float(left @ left)
            found[list(chosen)] = values
    return found


def _seconds(units: Sequence[Unit], batch: int) -> float:
    """Returns the seconds of decode phases, or of everything if requests share steps."""
    return sum(unit.seconds if batch == 1 else unit.clock_s for unit in units)


def _shapes(batch: int) -> tuple[str, ...]:
    return ("pass", "row") if batch == 1 else ("pass", "request", "row")


def _curve(what: str, batch: int) -> dict[str, Any]:
    """Returns a cost of 1 ms per pass, request or row; a request has at least one row."""
    if what == "pass":
        return {"tokens": [1], "ms": [1.0]}
    if what == "row":
        return {"tokens": [1, 2], "ms": [1.0, 2.0]}
    return {"tokens": [1, batch, batch + 1], "ms": [1.0, float(batch), float(batch)]}


def _note(bases: Sequence[tuple[str, str]], added: np.ndarray) -> str:
    told = [
        f"{ms:.3f} ms of the controller per {_KINDS[kind]} {what}"
        for (kind, what), ms in zip(bases, added, strict=True)
        if ms >= _TOLD_MS
    ]
    time = ", ".join(told) or "no further time of the controller"
    return f"measured here; with {time}, from runs of {', '.join(_names())}"


def _names() -> list[str]:
    return list(dict.fromkeys(name for name, _ in PROBES))
