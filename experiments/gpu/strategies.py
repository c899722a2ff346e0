"""Whole strategies: on Llama shapes with replayed acceptances, and on the bundled trained pair."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

from experiments.gpu.replayed import REPLAY, ReplayedShapes, ReplayedSource
from experiments.gpu.shapes import Shape, random_llama
from experiments.gpu.timing import Bench
from specdec.config.job import run_job_of
from specdec.metrics import RequestResult
from specdec.metrics.rates import summarise
from specdec.models.execution import Execution
from specdec.pairs import build_pair
from specdec.pairs.recorded import ReplayModels
from specdec.runs.hf_generate import HFBaseline
from specdec.runs.jobs import build_runner, prepare, stop_rules
from specdec.runs.runners import PartsRunner, Runner, TokenPrompt
from specdec.sampling.transform import SamplingParams
from specdec.sources import SyntheticSource
from specdec.state import StopRules

RECORD = "bundled:humaneval"
REPLAYED = ("ar", "speculative", "specinfer", "best_first")
TRAINED = ("ar", "speculative", "specinfer", "best_first", "staged", "hf_generate", "hf_assisted")
_MIN_OUTPUT = 64  # recorded tokens of a replayed prompt


def shape_rows(
    bench: Bench,
    target: Shape,
    draft: Shape,
    *,
    num_prompts: int,
    max_new_tokens: int,
    positions: int = 1024,
) -> list[dict[str, Any]]:
    """Every strategy on a pair of shapes, with replayed acceptances."""
    models = [
        random_llama(shape, device=bench.device, dtype=bench.dtype, positions=positions)
        for shape in (target, draft)
    ]
    record = build_pair({"kind": "replay", "record": RECORD})
    assert isinstance(record, ReplayModels)
    pair = ReplayedShapes(
        target=models[0],
        draft=models[1],
        record=record,
        attention=bench.attention,
        execution=Execution(graphs=bench.graphs, kernels=bench.kernels),
    )
    prompts = _prompts(record, num_prompts)
    stop = StopRules(max_new_tokens=max_new_tokens, eos_ids=pair.eos_ids)
    rows = []
    for name in REPLAYED:
        row = {"pair": f"{target.name}/{draft.name}", "acceptances": "replayed", "strategy": name}
        rows.append(row | _measured(bench, partial(_replayed, name, pair, stop), prompts))
    row = {"pair": f"{target.name}/{draft.name}", "acceptances": "replayed", "strategy": "staged"}
    rows.append(row | {"skipped": "a record has no text to count n-grams from"})
    row = {"pair": f"{target.name}/-", "acceptances": "none", "strategy": "hf_generate"}
    make_plain = partial(
        HFBaseline,
        kind="hf_generate",
        target=models[0],
        stop=StopRules(max_new_tokens=max_new_tokens),
        sampling=SamplingParams(),
    )
    rows.append(row | _measured(bench, make_plain, prompts))
    return _with_speedups(rows)


def trained_rows(
    bench: Bench, *, num_prompts: int, max_new_tokens: int, overrides: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """The bundled pair on its own prompts, in float32, with real acceptances."""
    size = (f"data.limit={num_prompts}", f"max_new_tokens={max_new_tokens}")
    common = ["model=tiny", f"model.device={bench.device}", "data=stdlib", *size, *overrides]
    common += [f"model.graphs={bench.graphs}"]  # has no effect on the baselines
    rows: list[dict[str, Any]] = []
    pair, prompts, _ = prepare(run_job_of(["strategy=ar", *common]).config)
    for name in TRAINED:
        cfg = run_job_of([f"strategy={name}", *common]).config
        row = {"pair": "bundled", "acceptances": "real", "strategy": name}
        make = partial(build_runner, cfg, pair, stop_rules(cfg, pair))
        rows.append(row | _measured(bench, make, prompts))
    return _with_speedups(rows)


def _replayed(name: str, pair: ReplayedShapes, stop: StopRules) -> Runner:
    """A preset on the pair with replaced candidates of its source."""
    cfg = run_job_of([f"strategy={name}", "model=random", "sampling=greedy"]).config
    runner = PartsRunner(cfg=cfg, pair=pair, stop=stop)
    real: Any = runner.parts.source
    if name != "ar":
        replayed = SyntheticSource(pair=pair.hidden)
        source = ReplayedSource(real=real, replayed=replayed, meter=runner.parts.meter)
        runner.parts = replace(runner.parts, source=source)
    return runner


def _prompts(record: ReplayModels, num: int) -> list[TokenPrompt]:
    """The first recorded prompts with at least ``_MIN_OUTPUT`` recorded output tokens."""
    hidden: Any = record.hidden
    long = (p for p in record.prompts() if hidden.request(p[0]).num_output >= _MIN_OUTPUT)
    return [TokenPrompt(*prompt) for prompt in islice(long, num)]


def _measured(
    bench: Bench, make: Callable[[], Any], prompts: Sequence[TokenPrompt]
) -> dict[str, Any]:
    """One warm-up over the prompts, which captures every shape, then one measured run."""
    if bench.late():
        return {"skipped": "no time left"}
    try:
        runner = make()
        runner.run(prompts, lambda _: None)
        results: list[RequestResult] = []
        totals = runner.run(prompts, results.append)
        replay_s = totals.model_s.get(REPLAY, 0.0)
        runner.close()
    except Exception as error:  # the other strategies continue
        return {"skipped": " ".join(f"{type(error).__name__}: {error}".split())[:200]}
    summary = summarise(results, totals)
    per_s = summary["tokens_per_s"]
    # Figures without the time of the replay itself, which no real run has.
    wall_s = sum(len(r.output) for r in results) / per_s if per_s else None
    gross = wall_s / max(1e-9, wall_s - replay_s) if wall_s else 1.0
    overhead = summary["overhead_share"]
    same = ("target_passes", "draft_passes", "acceptance_length", "relative_memory_traffic")
    return {
        "skipped": None,
        "tokens_per_s": per_s,
        "tokens_per_s_net": None if not wall_s else per_s * gross,
        "replay_ms": replay_s * 1e3,
        "overhead_share": None if overhead is None else overhead * gross,
        **{key: summary[key] for key in (*same, "loop_share", "new_tokens")},
    }


def _with_speedups(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds ``speedup``, over the ``ar`` row of the same pair; net figures of replayed rows."""
    base = next((row.get("tokens_per_s_net") for row in rows if row["strategy"] == "ar"), None)
    for row in rows:
        net = row.get("tokens_per_s_net")
        row["speedup"] = net / base if base and net else None
    return rows
