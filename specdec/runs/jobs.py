"""``specdec run`` and ``specdec compare``: prompts in, a folder of results out."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from specdec.data import (
    Request,
    fit_prompt,
    load_prompts,
    prompt_tokens,
    section_provenance,
)
from specdec.distributed.rank_groups import rank_logs_in
from specdec.errors import UserError
from specdec.files import write_json
from specdec.metrics import RequestResult, Run, RunTotals, comparison_row, summarise
from specdec.pairs import ModelPair, build_pair, check_recordable, record_run, write_record
from specdec.report import (
    RequestWriter,
    finished,
    print_table,
    provenance,
    write_comparison,
    write_run,
)
from specdec.report.origins import write_token_ends
from specdec.runs.conditions import (
    caveat,
    conditions_of,
    note_replay,
    note_unused_options,
    recorded_figures,
)
from specdec.runs.hf_generate import HFBaseline
from specdec.runs.runners import PartsRunner, Runner, TokenPrompt, sampling_params
from specdec.serving.arrivals import AT_ONCE
from specdec.state import StopRules
from specdec.trace import write_trace

LOGS_FOLDER = "logs"
"""Subfolder of a run folder with the output of its ranks, ``rank<r>.log``."""

_SYNTHETIC_PROMPT_TOKENS = 16
_RECORDED_CONDITIONS = ("data", "sampling", "dtype", "seed", "max_new_tokens")


class Progress(Protocol):
    """Receives the progress of long work."""

    def phase(self, label: str, total: int | None) -> None:
        """Starts a phase of ``total`` units (None: unknown) and ends the previous one."""

    def advance(self, count: int = 1, detail: str = "") -> None:
        """Counts ``count`` more units; ``detail`` is shown beside them."""

    def note(self, text: str) -> None:
        """Prints a line or a table."""


_Counted = list[tuple[RequestResult, RunTotals]]


@dataclass(frozen=True, slots=True)
class _Decoded:
    """Prompts decoded by several strategies.

    Attributes:
        pair: the models.
        prompts: decoded prompts.
        cut: how many of them were shortened.
        runners: one per strategy, closed.
        runs: strategy -> repeat -> finished requests.
    """

    pair: ModelPair
    prompts: Sequence[TokenPrompt]
    cut: int
    runners: Sequence[Runner]
    runs: Mapping[str, Sequence[_Counted]]

    def results(self, name: str) -> list[RequestResult]:
        """Requests of a strategy's first repeat."""
        return [result for result, _ in self.runs[name][0]]


def run_job(cfg: dict[str, Any], output_dir: Path, progress: Progress) -> dict[str, Any]:
    """Decodes a workload with one strategy; resumes after the prompts already on disk.

    Args:
        cfg: resolved configuration.
        output_dir: the run folder; ``requests.jsonl`` grows, ``summary.json`` is written last.
        progress: called for every finished prompt.

    Returns:
        The summary: every metric of docs/metrics.md.
    """
    decoded = _decode([cfg], output_dir, 1, progress)
    (runner,), pair = decoded.runners, decoded.pair
    if runner.trace is not None:
        _write_trace(runner, pair, output_dir)
    run = Run.of(decoded.runs[runner.name][0])
    summary = {
        "strategy": runner.name,
        "claims": str(runner.claims),
        **summarise(run.results, run.totals),
    }
    summary |= recorded_figures(pair) | caveat(cfg)
    conditions = conditions_of(cfg, pair, len(decoded.prompts), decoded.cut, repeats=1)
    _write_provenance(cfg, output_dir)
    write_run(output_dir, summary, run.results, conditions)
    print_table([summary], conditions)
    return summary


def compare_jobs(
    cfgs: list[dict[str, Any]], output_dir: Path, repeats: int, progress: Progress
) -> dict[str, Any]:
    """Decodes the same prompts with several strategies, interleaved prompt by prompt.

    Interleaving spreads a machine's drift evenly over the rows; ratios are taken within a repeat.

    Args:
        cfgs: one resolved configuration per row.
        output_dir: receives requests.jsonl, comparison.json, comparison.md and comparison.png.
        repeats: number of measurements of every prompt.
        progress: called for every finished prompt of every row.

    Returns:
        The content of ``comparison.json``.
    """
    base, decoded = cfgs[0], _decode(cfgs, output_dir, repeats, progress)
    pair, runners = decoded.pair, decoded.runners
    conditions = conditions_of(base, pair, len(decoded.prompts), decoded.cut, repeats)
    merged = {name: [Run.of(counted) for counted in runs] for name, runs in decoded.runs.items()}
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


def _decode(
    cfgs: Sequence[dict[str, Any]], output_dir: Path, repeats: int, progress: Progress
) -> _Decoded:
    """Decodes the prompts of ``cfgs[0]`` with every strategy; writes requests, record and texts."""
    base = cfgs[0]
    if base.get("threads"):
        torch.set_num_threads(int(base["threads"]))
    progress.phase("loading models", None)
    pair, prompts, cut = prepare(base)
    note_replay(pair, progress.note)
    note_unused_options(cfgs, pair, progress.note)
    runners: list[Runner] = []
    runs: dict[str, list[_Counted]] = {}
    try:
        with rank_logs_in(output_dir / LOGS_FOLDER):
            for cfg in cfgs:
                runners.append(build_runner(cfg, pair, stop_rules(cfg, pair)))
                runs[runners[-1].name] = []
        if base.get("record"):
            check_recordable(pair, runners[0].name, runners[0].claims)
        if base.get("clock", {}).get("kind", "measured") != "simulated":
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
    decoded = _Decoded(pair, prompts, cut, runners, runs)
    if base.get("record"):
        _write_record(base, decoded, output_dir, progress)
    results = {runner.name: decoded.results(runner.name) for runner in runners}
    write_token_ends(output_dir, results, pair.tokenizer)
    return decoded


def _one_repeat(
    base: Mapping[str, Any],
    runners: Sequence[Runner],
    prompts: Sequence[TokenPrompt],
    repeat: int,
    runs: dict[str, list[_Counted]],
    writer: RequestWriter,
    progress: Progress,
) -> None:
    left: dict[str, set[int]] = {}
    for runner in runners:
        done = finished(writer.path, runner.name, repeat)
        counted = [(r.result, r.totals) for r in done.values() if r.totals is not None]
        runs[runner.name].append(counted)
        left[runner.name] = {prompt.id for prompt in prompts if prompt.id not in done}
        progress.advance(len(counted))
    for turn, together in enumerate(_groups(prompts, base)):
        shift = (turn + repeat) % len(runners)  # rows take turns in running first, on a cold cache
        for runner in [*runners[shift:], *runners[:shift]]:
            group = [prompt for prompt in together if prompt.id in left[runner.name]]

            def book(result: RequestResult, total: RunTotals, name: str = runner.name) -> None:
                writer.write(name, result, repeat=repeat, totals=total)
                runs[name][-1].append((result, total))
                progress.advance(detail=name)

            if group:
                runner.run(group, lambda _: None, book)


def _groups(prompts: Sequence[TokenPrompt], cfg: Mapping[str, Any]) -> list[list[TokenPrompt]]:
    """Prompts that run together: one each, or all if they share batches or arrive over time."""
    at_once = (cfg.get("serving") or {}).get("arrivals", AT_ONCE) == AT_ONCE
    if cfg["batch_size"] == 1 and at_once:
        return [[p] for p in prompts]
    return [list(prompts)] if prompts else []


def build_runner(cfg: Mapping[str, Any], pair: ModelPair, stop: StopRules) -> Runner:
    """The runner of a strategy: transformers' own for kind ``hf``, else ours."""
    if cfg["strategy"]["kind"] == "hf":
        return HFBaseline.of(cfg, pair, stop)
    return PartsRunner(cfg=cfg, pair=pair, stop=stop)


def prepare(cfg: Mapping[str, Any]) -> tuple[ModelPair, list[TokenPrompt], int]:
    """Loads a pair and its prompts.

    Returns:
        The pair, tokenised prompts that fit its positions, and how many of them were shortened.

    Raises:
        UserError: ``max_new_tokens`` leaves no room for prompts.
    """
    pair = build_pair(cfg["model"])
    data = cfg["data"]
    recorded = getattr(pair, "prompts", None)
    if recorded is not None:
        return pair, [TokenPrompt(*prompt) for prompt in recorded()[: data["limit"]]], 0
    tokenizer, positions = pair.tokenizer, pair.max_positions
    least = 1 if tokenizer is not None else _SYNTHETIC_PROMPT_TOKENS
    room = None if positions is None else positions - int(cfg["max_new_tokens"])
    if room is not None and room < least:
        raise UserError(
            f"max_new_tokens={cfg['max_new_tokens']} leaves no room for a prompt of {least} tokens"
            f" in the model's {positions} positions; choose a smaller number"
        )
    if tokenizer is None:
        return pair, _random_prompts(pair, data["limit"], int(cfg["seed"])), 0
    limit = data.get("max_prompt_tokens")
    bounds = [b for b in (room, limit) if b is not None]
    prompts, cut = [], 0
    for prompt in load_prompts(Request.of(**data), tokenizer=tokenizer):
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


def _random_prompts(pair: ModelPair, limit: int | None, seed: int) -> list[TokenPrompt]:
    """Random prompts, for pairs without a tokenizer."""
    rng = np.random.default_rng(seed)
    shape = (limit or 16, _SYNTHETIC_PROMPT_TOKENS)
    tokens = rng.integers(1, pair.vocab_size, shape, np.int64)
    return [TokenPrompt(i, row) for i, row in enumerate(tokens)]


def stop_rules(cfg: Mapping[str, Any], pair: ModelPair) -> StopRules:
    """Stop rules of the configuration, with the model's end-of-sequence tokens.

    Raises:
        UserError: stop strings without a tokenizer.
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
    """Decodes one uncounted prompt, since first calls allocate and compile."""
    runner.run([prompt], lambda _: None)
    if runner.trace is not None:
        runner.trace.clear()


def _write_record(
    cfg: Mapping[str, Any], decoded: _Decoded, output_dir: Path, progress: Progress
) -> None:
    """``record=true``: a draft pass per prompt of the first row, excluded from all metrics."""
    results, pair = decoded.results(decoded.runners[0].name), decoded.pair
    progress.phase("recording the draft", len(results))
    conditions = conditions_of(cfg, pair, len(results), 0, 1)
    model = cfg["model"]
    record = record_run(
        pair=pair,
        prompts={prompt.id: prompt.tokens for prompt in decoded.prompts},
        results=results,
        sampling=sampling_params(cfg["sampling"]),
        about={
            "strategy": cfg["strategy"]["name"],
            "model": {k: model[k] for k in ("kind", "target", "draft") if k in model},
            **{k: v for k, v in conditions.items() if k in _RECORDED_CONDITIONS},
            "sampling_params": dict(cfg["sampling"]),
            "provenance": provenance(command=sys.argv, config=cfg),
        },
        on_request=lambda _: progress.advance(),
    )
    write_record(output_dir / "record.npz", record)


def _write_trace(runner: Runner, pair: ModelPair, output_dir: Path) -> None:
    """``trace=true``: writes the prompts decoded by this process, not those read from disk."""
    assert runner.trace is not None
    assert runner.parts is not None
    tokenizer = pair.tokenizer
    text = None if tokenizer is None else lambda token: str(tokenizer.decode([token]))
    executor = runner.parts.executor
    places = getattr(executor, "places", None)
    write_trace(output_dir, runner.trace, latency=executor.latency, places=places, text=text)


def _write_provenance(cfg: Mapping[str, Any], output_dir: Path, **extra: Any) -> None:
    data = section_provenance(cfg["data"]) if cfg["model"]["kind"] == "pretrained" else {}
    origin = provenance(command=sys.argv, config=cfg, extra={"data": data, **extra})
    write_json(output_dir / "provenance.json", origin)
