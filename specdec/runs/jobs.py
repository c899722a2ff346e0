"""Runs and comparisons: prompts in, run folders out."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from specdec.data import (
    Request,
    fit_prompt,
    load_requested,
    prompt_tokens,
    section_provenance,
)
from specdec.distributed.rank_groups import rank_logs_in
from specdec.errors import UserError
from specdec.metrics import RequestResult, Run, RunTotals, comparison_row, summarise
from specdec.pairs import (
    ModelPair,
    ReplayModels,
    build_pair,
    check_recordable,
    record_run,
    write_record,
)
from specdec.report import (
    RequestWriter,
    finished,
    print_table,
    provenance,
    write_comparison,
    write_json,
    write_run,
)
from specdec.report.origins import write_token_ends
from specdec.runs.conditions import (
    caveat,
    conditions_of,
    recorded_figures,
    tell_what_is_not_captured,
    tell_what_is_replayed,
)
from specdec.runs.runners import PartsRunner, Runner, TokenPrompt, build_runner, sampling_params
from specdec.serving.arrivals import AT_ONCE
from specdec.state import StopRules
from specdec.trace import write_trace

LOGS_FOLDER = "logs"
"""In a run folder: what its ranks have printed, ``rank<r>.log``."""

_SYNTHETIC_PROMPT_TOKENS = 16
_ABOUT = ("data", "sampling", "dtype", "seed", "max_new_tokens")  # conditions that a record keeps


class Progress(Protocol):
    """Where long work reports to."""

    def phase(self, label: str, total: int | None) -> None: ...

    def advance(self, count: int = 1, detail: str = "") -> None: ...

    def note(self, text: str) -> None: ...


def run_job(cfg: dict[str, Any], output_dir: Path, progress: Progress) -> dict[str, Any]:
    """Decodes a workload with one strategy; resumes behind the prompts already on disk.

    Args:
        cfg: resolved configuration.
        output_dir: the run folder; ``requests.jsonl`` grows, ``summary.json`` is written last.
        progress: told of every finished prompt.

    Returns:
        The summary: every metric of docs/metrics.md.
    """
    _set_threads(cfg)
    progress.phase("loading models", None)
    pair, prompts, cut = prepare(cfg)
    tell_what_is_replayed(pair, progress.note)
    tell_what_is_not_captured([cfg], pair, progress.note)
    with rank_logs_in(output_dir / LOGS_FOLDER):
        runner = build_runner(cfg, pair, stop_rules(cfg, pair))
    path = output_dir / "requests.jsonl"
    results, totals, todo = _behind(path, runner.name, 0, prompts)
    progress.phase(f"{runner.name}: decoding", len(todo))
    try:
        if cfg.get("record"):
            check_recordable(pair, runner.name, runner.claims)
        if todo and _on_wall_clock(cfg):
            _warm_up(runner, todo[0])
        with RequestWriter(path) as writer:

            def book(result: RequestResult, total: RunTotals) -> None:
                writer.write(runner.name, result, totals=total)
                totals.append(total)
                progress.advance(detail=f"prompt {result.id}")

            for group in _groups(todo, cfg):
                runner.run(group, results.append, book)
    finally:
        runner.close()
    if cfg.get("record"):
        _write_record(cfg, pair, prompts, results, output_dir, progress)
    if isinstance(runner, PartsRunner) and runner.trace is not None:
        _write_trace(runner, pair, output_dir)
    write_token_ends(output_dir, {runner.name: results}, pair.tokenizer)
    summary = {
        "strategy": runner.name,
        "claims": str(runner.claims),
        **summarise(results, RunTotals.merge(totals)),
    }
    summary |= recorded_figures(pair) | caveat(cfg)
    conditions = conditions_of(cfg, pair, len(prompts), cut, repeats=1)
    _write_provenance(cfg, output_dir)
    write_run(output_dir, summary, results, conditions)
    print_table([summary], conditions)
    return summary


def compare_jobs(
    cfgs: list[dict[str, Any]], output_dir: Path, repeats: int, progress: Progress
) -> dict[str, Any]:
    """Decodes the same prompts with several strategies, interleaved prompt by prompt.

    Interleaving lets a machine's drift fall on all rows alike; ratios are taken within a repeat.

    Args:
        cfgs: one resolved configuration per row.
        output_dir: gets requests.jsonl, comparison.json, comparison.md and comparison.png.
        repeats: how often everything is measured.
        progress: told of every finished prompt of every row.

    Returns:
        The content of ``comparison.json``.
    """
    base = cfgs[0]
    _set_threads(base)
    progress.phase("loading models", None)
    pair, prompts, cut = prepare(base)
    tell_what_is_replayed(pair, progress.note)
    tell_what_is_not_captured(cfgs, pair, progress.note)
    runners: list[Runner] = []
    runs: dict[str, list[list[tuple[RequestResult, RunTotals]]]] = {}
    try:
        with rank_logs_in(output_dir / LOGS_FOLDER):
            for cfg in cfgs:
                runners.append(build_runner(cfg, pair, stop_rules(cfg, pair)))
                runs[runners[-1].name] = []
        if base.get("record"):
            check_recordable(pair, runners[0].name, runners[0].claims)
        if _on_wall_clock(base):
            progress.phase("warming up", len(runners))
            for runner in runners:
                _warm_up(runner, prompts[0])
                progress.advance(detail=runner.name)
        progress.phase("decoding", repeats * len(prompts) * len(runners))
        with RequestWriter(output_dir / "requests.jsonl") as writer:
            for repeat in range(repeats):
                _one_repeat(base, runners, prompts, repeat, runs, writer, progress)
    finally:
        for runner in runners:
            runner.close()
    if base.get("record"):
        recorded = [result for result, _ in runs[runners[0].name][0]]
        _write_record(base, pair, prompts, recorded, output_dir, progress)
    first = {name: [result for result, _ in found[0]] for name, found in runs.items()}
    write_token_ends(output_dir, first, pair.tokenizer)
    conditions = conditions_of(base, pair, len(prompts), cut, repeats)
    merged = {name: [_as_run(parts) for parts in found] for name, found in runs.items()}
    rows = [
        comparison_row(r.name, merged[r.name], merged.get("ar"), claims=r.claims)
        | recorded_figures(pair)
        | caveat(cfg)
        for r, cfg in zip(runners, cfgs, strict=True)
    ]
    _write_provenance(base, output_dir, strategies=[r.name for r in runners])
    write_comparison(output_dir, rows, conditions, merged)
    print_table(rows, conditions)
    return {"rows": rows, "conditions": conditions}


def _one_repeat(
    base: Mapping[str, Any],
    runners: Sequence[Runner],
    prompts: Sequence[TokenPrompt],
    repeat: int,
    runs: dict[str, list[list[tuple[RequestResult, RunTotals]]]],
    writer: RequestWriter,
    progress: Progress,
) -> None:
    left: dict[str, set[int]] = {}
    for runner in runners:
        results, totals, todo = _behind(writer.path, runner.name, repeat, prompts)
        runs[runner.name].append(list(zip(results, totals, strict=True)))
        left[runner.name] = {prompt.id for prompt in todo}
        progress.advance(len(results))
    for turn, whole in enumerate(_groups(prompts, base)):
        shift = (turn + repeat) % len(runners)  # nobody always runs first on a cold cache
        for runner in [*runners[shift:], *runners[:shift]]:
            group = [prompt for prompt in whole if prompt.id in left[runner.name]]

            def book(result: RequestResult, total: RunTotals, name: str = runner.name) -> None:
                writer.write(name, result, repeat=repeat, totals=total)
                runs[name][-1].append((result, total))
                progress.advance(detail=name)

            if group:
                runner.run(group, lambda _: None, book)


def _behind(
    path: Path, name: str, repeat: int, prompts: Sequence[TokenPrompt]
) -> tuple[list[RequestResult], list[RunTotals], list[TokenPrompt]]:
    """What an interrupted command has left of a strategy and repeat; the prompts behind it."""
    done = finished(path, name, repeat)
    found = [(r.result, r.totals) for r in done.values() if r.totals is not None]
    todo = [prompt for prompt in prompts if prompt.id not in done]
    return [result for result, _ in found], [totals for _, totals in found], todo


def _groups(prompts: Sequence[TokenPrompt], cfg: Mapping[str, Any]) -> list[list[TokenPrompt]]:
    """Prompts run together: one by one, or all where requests share batches or arrive in time."""
    at_once = (cfg.get("serving") or {}).get("arrivals", AT_ONCE) == AT_ONCE
    if cfg["batch_size"] == 1 and at_once:
        return [[p] for p in prompts]
    return [list(prompts)] if prompts else []


def _as_run(parts: Sequence[tuple[RequestResult, RunTotals]]) -> Run:
    return Run(tuple(result for result, _ in parts), RunTotals.merge([t for _, t in parts]))


def prepare(cfg: Mapping[str, Any]) -> tuple[ModelPair, list[TokenPrompt], int]:
    """Pair, tokenised prompts that fit its positions, and how many of them were cut."""
    pair = build_pair(cfg["model"])
    data = cfg["data"]
    if isinstance(pair, ReplayModels):
        return pair, [TokenPrompt(*prompt) for prompt in pair.prompts()[: data["limit"]]], 0
    tokenizer, positions = pair.tokenizer, pair.max_positions
    least = 1 if tokenizer is not None else _SYNTHETIC_PROMPT_TOKENS
    room = None if positions is None else positions - int(cfg["max_new_tokens"])
    if room is not None and room < least:
        raise UserError(
            f"max_new_tokens={cfg['max_new_tokens']} leaves no room for a prompt of {least} tokens"
            f" in the model's {positions} positions; choose a smaller number"
        )
    if tokenizer is None:
        return pair, _made_up_prompts(pair, data["limit"], int(cfg["seed"])), 0
    found = load_requested(Request.of(data), tokenizer=tokenizer)
    limit = data.get("max_prompt_tokens")
    bounds = [b for b in (room, limit) if b is not None]
    prompts, cut = [], 0
    for prompt in found:
        tokens = prompt_tokens(prompt, tokenizer, chat=data.get("chat", "auto"))
        if bounds:
            tokens, num_cut = fit_prompt(
                tokens,
                max_len=min(bounds),
                truncation=data.get("truncation", "left"),
                label=f"prompt {prompt.id} of data={data['name']}",
            )
            cut += num_cut > 0
        prompts.append(TokenPrompt(prompt.id, np.asarray(tokens, np.int64)))
    return pair, prompts, cut


def _made_up_prompts(pair: ModelPair, limit: int | None, seed: int) -> list[TokenPrompt]:
    """Random prompts, where there is no tokenizer to read text with."""
    rng = np.random.default_rng(seed)
    shape = (limit or 16, _SYNTHETIC_PROMPT_TOKENS)
    tokens = rng.integers(1, pair.vocab_size, shape, np.int64)
    return [TokenPrompt(i, row) for i, row in enumerate(tokens)]


def stop_rules(cfg: Mapping[str, Any], pair: ModelPair) -> StopRules:
    """When requests are complete, as the configuration and the model's own end tokens say.

    Raises:
        UserError: for stop strings without a tokenizer.
    """
    tokenizer = pair.tokenizer
    strings = tuple(cfg.get("stop_strings") or ())
    if strings and tokenizer is None:
        raise UserError(
            f"stop_strings={list(strings)} need a tokenizer; use model=tiny or model=hf"
        )
    return StopRules(
        max_new_tokens=int(cfg["max_new_tokens"]),
        eos_ids=frozenset() if cfg.get("ignore_eos") else pair.eos_ids,
        stop_strings=strings,
        decode=None if tokenizer is None else lambda ids: str(tokenizer.decode(list(ids))),
    )


def _warm_up(runner: Runner, prompt: TokenPrompt) -> None:
    """One uncounted prompt: first calls allocate, compile and page in."""
    runner.run([prompt], lambda _: None)
    if isinstance(runner, PartsRunner) and runner.trace is not None:
        runner.trace.clear()


def _on_wall_clock(cfg: Mapping[str, Any]) -> bool:
    return cfg.get("clock", {}).get("kind", "measured") != "simulated"


def _set_threads(cfg: Mapping[str, Any]) -> None:
    if cfg.get("threads"):
        torch.set_num_threads(int(cfg["threads"]))


def _write_record(
    cfg: Mapping[str, Any],
    pair: ModelPair,
    prompts: Sequence[TokenPrompt],
    results: Sequence[RequestResult],
    output_dir: Path,
    progress: Progress,
) -> None:
    """``record=true``: one pass of the draft per finished prompt, in nobody's figures."""
    progress.phase("recording the draft", len(results))
    model = cfg["model"]
    record = record_run(
        pair=pair,
        prompts={prompt.id: prompt.tokens for prompt in prompts},
        results=results,
        sampling=sampling_params(cfg["sampling"]),
        about={
            "strategy": cfg["strategy"]["name"],
            "model": {k: model[k] for k in ("kind", "target", "draft") if k in model},
            **{
                k: v for k, v in conditions_of(cfg, pair, len(results), 0, 1).items() if k in _ABOUT
            },
            "sampling_params": dict(cfg["sampling"]),
            "provenance": provenance(command=sys.argv, config=cfg),
        },
        on_request=lambda _: progress.advance(),
    )
    write_record(output_dir / "record.npz", record)


def _write_trace(runner: PartsRunner, pair: ModelPair, output_dir: Path) -> None:
    """``trace=true``: what this process has decoded (prompts that lay on disk are not in it)."""
    assert runner.trace is not None
    tokenizer = pair.tokenizer
    text = None if tokenizer is None else lambda token: str(tokenizer.decode([token]))
    executor = runner.parts.executor
    places = getattr(executor, "places", None)
    write_trace(output_dir, runner.trace, latency=executor.latency, places=places, text=text)


def _write_provenance(cfg: Mapping[str, Any], output_dir: Path, **extra: Any) -> None:
    data = section_provenance(cfg["data"]) if cfg["model"]["kind"] == "pretrained" else {}
    found = provenance(command=sys.argv, config=cfg, extra={"data": data, **extra})
    write_json(output_dir / "provenance.json", found)
