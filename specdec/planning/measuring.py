"""A profile of this machine, and of the controller's own time per pass: ``profile=measured``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from specdec.clocks import Work
from specdec.config.checks import check_section
from specdec.config.hydra import compose_config
from specdec.config.job import checked_job, run_job_of
from specdec.errors import UserError
from specdec.metrics import RequestResult, RunTotals
from specdec.pairs import HuggingFacePair, ModelPair
from specdec.planning.acceptance import OfRecord
from specdec.planning.machines import Profiled
from specdec.profiling.job import profile_of
from specdec.profiling.passes import measure_model
from specdec.profiling.proposal import Workload, costs_node
from specdec.profiling.transfer import measure_transfer
from specdec.runs.jobs import Progress, stop_rules
from specdec.runs.runners import PartsRunner, TokenPrompt

_PROBES = ("ar", "speculative", "best_first")
_PROBE_PROMPTS = 4
_TOKENS = (1, 2, 4, 8, 16, 32, 64)


def measured_costs(
    words: Sequence[str], extra: Sequence[Path], *, stages: int, progress: Progress
) -> tuple[dict[str, Any], Workload]:
    """Cost curves of the models on this machine, as ``specdec profile`` measures them.

    Args:
        words: of the command line, without clock, strategy and output folder.
        extra: further configuration trees.
        stages: of the target.
        progress: receives the phases.

    Returns:
        The costs, and the models and prompts.

    Raises:
        UserError: models that do not exist.
    """
    composed = compose_config([*words, f"executor.stages={stages}"], name="profiling", extra=extra)
    values = dict(composed.values)
    section = values.pop("profiling")
    check_section("profiling", section, {})
    job = checked_job(replace(composed, values=values))
    work = Workload.of({**job.config, "profiling": section}, progress)
    pair = work.pair
    if not isinstance(pair, HuggingFacePair):
        raise UserError("profile=measured measures models: use model=tiny, hf or random")
    plan: dict[str, Any] = {"tokens": list(_TOKENS), "repeats": work.options.repeats}
    progress.phase("measuring passes", None)
    samples = measure_model(
        pair,
        **plan,
        stages=stages,
        context=work.options.context,
        on_repeat=lambda kind: progress.advance(detail=kind),
    )
    if stages > 1:
        width = int(pair.target.config.get_text_config().hidden_size)
        dtype = next(pair.target.parameters()).dtype
        samples[Work.TRANSFER] = measure_transfer(width=width, dtype=dtype, **plan)
    profile = profile_of(samples, name="measured", note="")
    return costs_node(profile), work


def with_controller(
    costs: Mapping[str, Any],
    *,
    work: Workload,
    words: Sequence[str],
    extra: Sequence[Path],
    acceptance: OfRecord,
    progress: Progress,
) -> tuple[dict[str, Any], str]:
    """Costs with the controller's own time per target pass and per draft pass.

    A simulated clock charges models alone. Three short measured runs and the same runs simulated
    differ by this time; it is the least-squares time per pass of each kind, at least 0.

    Args:
        costs: measured, on one device.
        work, words, extra: models and prompts, and the words of the command line.
        acceptance: the record of the same prompts.
        progress: receives the phases.

    Returns:
        The costs, and a note.
    """
    progress.phase("measuring the controller", len(_PROBES))
    rows, missing = [], []
    played = acceptance.pair()
    for name in _PROBES:
        real = run_job_of([*words, f"strategy={name}"], extra).config
        profile = {"kind": "simulated", "profile": "measured", "scale": 1.0, "costs": dict(costs)}
        ids = {request.id for request in acceptance.record.requests}
        prompts = [prompt for prompt in work.prompts if prompt.id in ids][:_PROBE_PROMPTS]
        seconds, totals, num = _decoded(real, work.pair, prompts)
        recorded = [TokenPrompt(*p) for p in played.prompts() if p[0] in {q.id for q in prompts}]  # type: ignore[attr-defined]
        fake = {**real, "clock": profile}
        simulated, _, num_played = _decoded(fake, played, recorded)
        rows.append((totals.target_passes / num, totals.draft_passes / num))
        missing.append(seconds / num - simulated / num_played)
        progress.advance(detail=name)
    added = _least_squares(np.array(rows), np.array(missing))
    changed = dict(costs)
    for kind, more in zip(("stage", "draft"), 1e3 * added, strict=True):
        if kind in changed:
            changed[kind] = {
                **changed[kind],
                "ms": [ms + float(more) for ms in changed[kind]["ms"]],
            }
    note = (
        f"measured here; with {1e3 * added[0]:.2f} ms of the controller per target pass and"
        f" {1e3 * added[1]:.2f} ms per draft pass, from runs of {', '.join(_PROBES)}"
    )
    return changed, note


def measured_here(
    words: Sequence[str],
    extra: Sequence[Path],
    *,
    stages: int,
    acceptance: OfRecord,
    progress: Progress,
) -> tuple[dict[str, Any], str]:
    """Costs of this machine, on one device with the controller's own time, and a note."""
    costs, work = measured_costs(words, extra, stages=stages, progress=progress)
    if stages > 1:
        return costs, "measured here"
    return with_controller(
        costs, work=work, words=words, extra=extra, acceptance=acceptance, progress=progress
    )


def measured_machine(costs: Mapping[str, Any], note: str, *, stages: int, devices: int) -> Profiled:
    """The machine of measured costs."""
    profile = {"costs": dict(costs), "note": note, "stages": stages}
    return Profiled(name="measured", profile=profile, devices=devices)


def _decoded(
    cfg: Mapping[str, Any], pair: ModelPair, prompts: Sequence[TokenPrompt]
) -> tuple[float, RunTotals, int]:
    """(seconds of the decode phases, totals, tokens in them); the first prompt warms up."""
    from specdec.metrics.times import decode_phase

    runner = PartsRunner(cfg=cfg, pair=pair, stop=stop_rules(cfg, pair))
    results: list[RequestResult] = []
    try:
        runner.run(prompts[:1], lambda _: None)
        totals = RunTotals.merge([runner.run([p], results.append) for p in prompts])
    finally:
        runner.close()
    phases = [decode_phase(result) for result in results]
    return sum(p.seconds for p in phases), totals, max(sum(p.tokens for p in phases), 1)


def _least_squares(rows: np.ndarray, values: np.ndarray) -> np.ndarray:
    """float64[2]: least squares with no negative part."""
    best = np.linalg.lstsq(rows, values, rcond=None)[0]
    if (best >= 0.0).all():
        return best
    alone = [
        max(float(rows[:, k] @ values / max(rows[:, k] @ rows[:, k], 1e-12)), 0.0) for k in (0, 1)
    ]
    options = [np.array([alone[0], 0.0]), np.array([0.0, alone[1]])]
    return min(options, key=lambda x: float(((rows @ x - values) ** 2).sum()))
