"""The work of ``specdec run`` and ``specdec compare``: decodes prompts and writes result files."""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
import torch

from specdec.clocks import ClockKind
from specdec.clocks.timed_runs import timed_run
from specdec.compose.workbench import check_parts
from specdec.data import Prompt, Request, data_provenance, fit_prompt, load_prompts, prompt_tokens
from specdec.data.prompt import TURN_IDS
from specdec.distributed.rank_groups import prepare_ranks, rank_logs_in
from specdec.errors import UserError
from specdec.files import write_bytes, write_json, write_text
from specdec.metrics import RequestResult, Run, RunTotals, comparison_row, summarise
from specdec.metrics.compare import prompt_speedups
from specdec.models.loading import usable_device
from specdec.pairs import ModelPair, build_pair
from specdec.pairs.record import check_recordable, record_run, write_record
from specdec.report.origins import token_ends
from specdec.report.plots import comparison_png, run_png
from specdec.report.provenance import cpu_info, provenance
from specdec.report.results import ENDS_FILE, RequestRecord, RequestWriter, Result, runs_of
from specdec.report.spec_bench import Answer, by_category, write_answers
from specdec.report.styles import row_styles
from specdec.report.tables import advice_of, markdown_table, print_table
from specdec.runs.cpu_times import CpuMeter, disturbance
from specdec.runs.progress import Progress
from specdec.runs.runners import PartsRunner, Runner, TokenPrompt, decoded, sampling_params
from specdec.serving.arrivals import AT_ONCE
from specdec.state import StopRules
from specdec.trace.files import write_trace
from specdec.types import IntArray

_SYNTHETIC_PROMPT_TOKENS = 16
_MAX_SYNTHETIC_PROMPTS = 1_000_000

_BASELINES = {
    "hf": "specdec.runs.hf_generate.baseline_of_transformers",
    "rival": "specdec.runs.rival.baseline_of_runtime",
    "endpoint": "specdec.runs.rival.baseline_of_endpoint",
}
"""``strategy.kind`` -> function that builds the runner of another program; imported when used."""


def run_job(cfg: dict[str, Any], output_dir: Path, progress: Progress) -> dict[str, Any]:
    """Decodes with one strategy, or resumes a run; returns the metrics of ``summary.json``."""
    decoding = _Decoding([cfg], output_dir, progress, None)
    decoding.decode(1)
    (runner,) = decoding.runners
    if runner.trace is not None and runner.parts is not None:  # of prompts decoded here
        executor, tokenizer = runner.parts.executor, decoding.pair.tokenizer
        write_trace(
            output_dir,
            runner.trace,
            latency=executor.latency,
            places=executor.stage_of_rank,
            text=None if tokenizer is None else lambda token: str(tokenizer.decode([token])),
        )
    (run,) = decoding.runs[runner.name]
    summary = {
        "strategy": runner.name,
        "claims": str(runner.claims),
        **summarise(run.results, run.totals),
        **decoding.further_metrics(runner, cfg),
        "by_category": by_category(decoding.write_answers()[runner.name], None),
    }
    _write_provenance(cfg, output_dir)
    conditions = decoding.conditions
    result = Result(
        folder=output_dir,
        name=runner.name,
        strategy=runner.name,
        config=cfg,
        records=tuple(decoding.records.values()),
        summary=summary,
        conditions=conditions,
    )
    write_bytes(output_dir / "run.png", run_png(result))
    # Written last: a folder with this file is complete.
    write_json(output_dir / "summary.json", {**summary, "conditions": conditions})
    print_table([summary], conditions, advice=advice_of([summary], [cfg], output_dir))
    return summary


def compare_jobs(
    cfgs: list[dict[str, Any]],
    output_dir: Path,
    repeats: int,
    progress: Progress,
    pair: ModelPair | None = None,
    *,
    stays: bool = True,
) -> dict[str, Any]:
    """Decodes the same prompts with several strategies, interleaved prompt by prompt, so that a
    machine's drift is spread evenly; returns the content of ``comparison.json``.

    ``pair``: models to use; None builds them. ``stays``: False if the folder will be deleted.
    """
    decoding = _Decoding(cfgs, output_dir, progress, pair)
    decoding.decode(repeats)
    conditions, runs, answers = decoding.conditions, decoding.runs, decoding.write_answers()
    rows = [
        comparison_row(r.name, runs[r.name], runs.get("ar"), claims=r.claims)
        | decoding.further_metrics(r, cfg)
        | {"by_category": by_category(answers[r.name], answers.get("ar"))}
        for r, cfg in zip(decoding.runners, cfgs, strict=True)
    ]
    _write_provenance(cfgs[0], output_dir, strategies=list(runs))
    comparison = {"rows": rows, "conditions": conditions}
    advice = advice_of(rows, cfgs, output_dir if stays else None)
    write_text(output_dir / "comparison.md", markdown_table(rows, conditions, advice=advice))
    styles = row_styles([*runs]).values()
    points = [prompt_speedups(runs[n], runs.get("ar", ()) if n != "ar" else ()) for n in runs]
    write_bytes(output_dir / "comparison.png", comparison_png(rows, conditions, [*styles], points))
    write_json(output_dir / "comparison.json", comparison)
    print_table(rows, conditions, advice=advice)
    return comparison


class _Decoding:
    """Decodes the prompts of the first configuration with every strategy.

    ``records``: (strategy, repeat, prompt id) -> record. ``runs``: strategy -> one run per repeat.
    """

    def __init__(
        self, cfgs: list[dict[str, Any]], folder: Path, progress: Progress, pair: ModelPair | None
    ) -> None:
        self._cfgs, self._folder, self._progress = cfgs, folder, progress
        self._base = cfgs[0]
        distributed = [c for c in cfgs if c.get("executor", {}).get("transport") == "distributed"]
        if any(cfg.get("clock", {}).get("kind") != "simulated" for cfg in distributed):
            prepare_ranks()
        if self._base.get("threads"):
            torch.set_num_threads(int(self._base["threads"]))
        pair = pair or build_pair(self._base["model"])
        for cfg in cfgs:
            if "policy" in cfg:  # rows of other programs have no parts
                check_parts(cfg, pair)
        self.pair, self._prompts, self._cut = prepare(self._base, pair, progress)
        self.runners: list[Runner] = []
        self.records: dict[tuple[str, int, int], RequestRecord] = {}
        self.runs: dict[str, list[Run]] = {}
        # Whether every request is submitted at the start, so that none is waited for.
        serving = self._base.get("serving") or {}
        self._at_once = serving.get("arrivals", AT_ONCE) == AT_ONCE
        for note in notes_on_models(cfgs, self.pair):
            progress.note(note)

    def decode(self, repeats: int) -> None:
        base, progress = self._base, self._progress
        try:
            with rank_logs_in(self._folder / "logs"):
                for cfg in self._cfgs:
                    self.runners.append(build_runner(cfg, self.pair, stop_rules(cfg, self.pair)))
            note_levels_on_one_stage(self.runners, progress.note)
            if base.get("record"):
                check_recordable(self.pair, self.runners[0].name, self.runners[0].claims)
            if base.get("clock", {}).get("kind", "measured") != "simulated":
                progress.phase("warming up", len(self.runners))
                for runner in self.runners:
                    warm_up(runner, base, self._prompts)
                    progress.advance(detail=runner.name)
            turns = sum(self._num_turns(prompt) for prompt in self._prompts)
            progress.phase("decoding", repeats * turns * len(self.runners))
            with RequestWriter(self._folder / "requests.jsonl") as self._writer:
                self.records = self._writer.records
                progress.advance(len(self.records))
                for repeat in range(repeats):
                    self._repeat(repeat)
        finally:
            for runner in self.runners:
                runner.close()
        self.runs = {runner.name: runs_of(self._records_of(runner)) for runner in self.runners}
        first = {name: runs[0].results for name, runs in self.runs.items()}  # of repeats
        prompts = len(self._prompts)
        self.conditions = conditions_of(base, self.pair, prompts, self._cut, repeats)
        if base.get("record"):
            self._write_record(first[self.runners[0].name])
        if self.pair.tokenizer is not None:
            decode = partial(decoded, tokenizer=self.pair.tokenizer)
            ends = {k: {r.id: token_ends(r.output, decode) for r in of} for k, of in first.items()}
            write_json(self._folder / ENDS_FILE, ends)
        for runner in self.runners:
            for line in () if runner.parts is None else runner.parts.policy.notes():
                progress.note(line)

    def _records_of(self, runner: Runner) -> list[RequestRecord]:
        return [record for record in self.records.values() if record.strategy == runner.name]

    def further_metrics(self, runner: Runner, cfg: Mapping[str, Any]) -> dict[str, Any]:
        """Returns metrics that ``summarise`` cannot compute.

        ``loop_share`` (share of repeated text) of a replay is the record's, since a replay's tokens
        are made up. ``caveat`` says why the result is not comparable or not representative.
        """
        records = self._records_of(runner)
        metrics: dict[str, Any] = {"runtime": runner.runtime}
        if self.pair.about:
            metrics["loop_share"] = self.pair.about.get("loop_share")
        own = runner.caveat if runner.parts is None else runner.parts.source.caveat
        if caveats := [*filter(None, (cfg.get("clock", {}).get("caveat"), own))]:
            metrics["caveat"] = "; ".join(caveats)
        if all(record.cpu is not None for record in records):
            reasons = [record.disturbed for record in records if record.disturbed]
            metrics |= {"disturbed": len(reasons), "disturbed_because": next(iter(reasons), None)}
        return metrics

    def _repeat(self, repeat: int) -> None:
        # Prompts run together if they share batches or arrive over time.
        alone = self._base["batch_size"] == 1 and self._at_once
        groups = [[prompt] for prompt in self._prompts] if alone else [self._prompts]
        for number, group in enumerate(groups):
            shift = (number + repeat) % len(self.runners)  # rotates which row meets cold caches
            for runner in [*self.runners[shift:], *self.runners[:shift]]:
                turns: Sequence[TokenPrompt] = group
                while turns:
                    self._measure(runner, repeat, turns)
                    turns = self._next_turn(turns[0], runner.name, repeat) if alone else ()

    def _measure(self, runner: Runner, repeat: int, group: Sequence[TokenPrompt]) -> None:
        prompts = {p.id: p for p in group if (runner.name, repeat, p.id) not in self.records}
        if not prompts:
            return
        measured = runner.parts is None or runner.parts.clock.kind is ClockKind.MEASURED
        on_gpu = not str(self.pair.device).startswith("cpu")
        meter = CpuMeter(runner.pids, waits=on_gpu or not self._at_once)

        def book(result: RequestResult, totals: RunTotals) -> None:
            known: dict[str, Any] = {}
            if measured:
                cpu = meter.stop()
                known |= {"cpu": cpu, "disturbed": disturbance(cpu)}
            if (source := prompts[result.id].source) is not None:
                known |= {"prompt": source.name, "category": source.category}
            self._writer.write(RequestRecord(runner.name, repeat, result, totals, **known))
            self._progress.advance(detail=runner.name)
            if measured:  # reading the threads' times takes a millisecond of a paced schedule
                meter.start()

        with timed_run():
            if measured:
                meter.start()
            runner.run([*prompts.values()], lambda _: None, book)

    def _num_turns(self, prompt: TokenPrompt) -> int:
        all_turns = self._base["data"].get("turns", "first") == "all"
        return 1 + (len(prompt.source.later) if all_turns and prompt.source else 0)

    def _next_turn(self, prompt: TokenPrompt, name: str, repeat: int) -> list[TokenPrompt]:
        """Returns a list of the dialogue's next prompt, with earlier answers; [] at its end."""
        turn, first = divmod(prompt.id, TURN_IDS)
        if turn + 1 >= self._num_turns(prompt):
            return []
        assert prompt.source is not None, "data= has sources"
        earlier = [self.records[name, repeat, first + t * TURN_IDS] for t in range(turn + 1)]
        answers = [record.result.text for record in earlier]
        label = f"turn {turn + 2} of prompt {first} of data={self._base['data']['name']}"
        tokens, _ = _fitted(self._base, self.pair, prompt.source, label, answers)
        return [TokenPrompt(prompt.id + TURN_IDS, tokens, prompt.source)]

    def write_answers(self) -> dict[str, list[Answer]]:
        prompts = {p.id: p.source for p in self._prompts if p.source is not None}
        return {n: write_answers(self._folder, n, prompts, runs) for n, runs in self.runs.items()}

    def _write_record(self, results: Sequence[RequestResult]) -> None:
        """Writes record.npz, the draft's ranks of the outputs, by an uncounted pass per prompt."""
        cfg, pair = self._base, self.pair
        self._progress.phase("recording the draft", len(results))
        models = pair.section()
        names = {k: models[k] for k in ("target", "draft") if models.get(k)}
        stated = ("data", "sampling", "dtype", "seed", "max_new_tokens")
        record = record_run(
            pair=pair,
            prompts={prompt.id: prompt.tokens for prompt in self._prompts},
            results=results,
            sampling=sampling_params(cfg["sampling"]),
            about={
                "strategy": cfg["strategy"]["name"],
                "model": {"kind": cfg["model"]["kind"], **names},
                **{k: v for k, v in self.conditions.items() if k in stated},
                "sampling_params": dict(cfg["sampling"]),
                "provenance": provenance(command=sys.argv, config=cfg),
            },
            on_request=lambda _: self._progress.advance(),
        )
        write_record(self._folder / "record.npz", record)


def build_runner(cfg: Mapping[str, Any], pair: ModelPair, stop: StopRules) -> Runner:
    if (name := _BASELINES.get(cfg["strategy"]["kind"])) is not None:
        return resolve_name(name)(cfg, pair, stop)  # type: ignore[no-any-return]
    return PartsRunner(cfg=cfg, pair=pair, stop=stop)


def prepare(
    cfg: Mapping[str, Any], pair: ModelPair | None = None, progress: Progress | None = None
) -> tuple[ModelPair, list[TokenPrompt], int]:
    """Loads a model pair, unless one is given, and prompts (random if it has no tokenizer).

    Returns the pair, the prompts, which fit into its positions, and how many were shortened.
    """
    pair = pair or build_pair(cfg["model"])
    elsewhere = cfg.get("executor", {}).get("transport") == "distributed"
    if cfg["strategy"]["kind"] in ("parts", "hf") and not elsewhere:
        usable_device(pair.device)
    label = "loading models"
    if num_bytes := pair.needed_bytes:
        label += f", {num_bytes / 1e9:.2g} GB of weights"
    (progress or Progress()).phase(label)
    data = cfg["data"]
    recorded = pair.prompts()
    if recorded is not None:
        return pair, [TokenPrompt(*prompt) for prompt in recorded[: data["limit"]]], 0
    least = 1 if pair.tokenizer is not None else _SYNTHETIC_PROMPT_TOKENS
    room = _room(cfg, pair)
    if room is not None and room < least:
        raise UserError(
            f"max_new_tokens={cfg['max_new_tokens']} leaves no room for a prompt of {least} tokens"
            f" in the model's {pair.max_positions} positions; choose a smaller number"
        )
    if pair.tokenizer is None:
        rng = np.random.default_rng(int(cfg["seed"]))
        count = data["limit"] or 16
        if count > _MAX_SYNTHETIC_PROMPTS:
            raise UserError(
                f"data.limit={count} is more than {_MAX_SYNTHETIC_PROMPTS} random prompts:"
                " choose fewer"
            )
        drawn = rng.integers(1, pair.vocab_size, (count, _SYNTHETIC_PROMPT_TOKENS), np.int64)
        return pair, [TokenPrompt(i, row) for i, row in enumerate(drawn)], 0
    prompts, cut = [], 0
    for prompt in load_prompts(Request.of(**data)):
        label = f"prompt {prompt.id} of data={data['name']}"
        tokens, num_cut = _fitted(cfg, pair, prompt, label)
        cut += num_cut > 0
        prompts.append(TokenPrompt(prompt.id, tokens, prompt))
    return pair, prompts, cut


def _fitted(
    cfg: Mapping[str, Any], pair: ModelPair, prompt: Prompt, label: str, answers: Sequence[str] = ()
) -> tuple[IntArray, int]:
    data, tokenizer = cfg["data"], pair.tokenizer
    assert tokenizer is not None, "data= has a tokenizer"
    tokens = prompt_tokens(prompt, tokenizer, chat=data.get("chat", "auto"), answers=answers)
    bounds = (_room(cfg, pair), data.get("max_prompt_tokens"))
    longest = min((bound for bound in bounds if bound is not None), default=len(tokens))
    truncation = data.get("truncation", "left")
    return fit_prompt(tokens, max_len=longest, truncation=truncation, label=label)


def _room(cfg: Mapping[str, Any], pair: ModelPair) -> int | None:
    positions = pair.max_positions
    return None if positions is None else positions - int(cfg["max_new_tokens"])


def warm_up(runner: Runner, cfg: Mapping[str, Any], prompts: Sequence[TokenPrompt]) -> None:
    """Decodes prompts without counting them, since first calls allocate, compile and capture CUDA
    graphs. If graphs are on, the longest prompts are decoded, as many as a batch holds.
    """
    first = prompts[:1]
    if cfg["model"].get("graphs", "off") != "off":
        longest = sorted(prompts, key=lambda prompt: len(prompt.tokens), reverse=True)
        first = longest[: int(cfg["batch_size"])]
    runner.warming_up = True
    try:
        runner.run(first, lambda _: None)
    finally:
        runner.warming_up = False
    if runner.trace is not None:
        runner.trace.clear()


def stop_rules(cfg: Mapping[str, Any], pair: ModelPair) -> StopRules:
    tokenizer, strings = pair.tokenizer, list(cfg.get("stop_strings") or ())
    if strings and tokenizer is None:
        raise UserError(f"stop_strings={strings} need a tokenizer; use model=tiny or model=hf")
    return StopRules(
        max_new_tokens=int(cfg["max_new_tokens"]),
        eos_ids=frozenset() if cfg.get("ignore_eos") else pair.eos_ids,
        stop_strings=tuple(strings),
        decode=None if tokenizer is None else lambda ids: str(tokenizer.decode(list(ids))),
    )


def _write_provenance(cfg: Mapping[str, Any], output_dir: Path, **extra: Any) -> None:
    data = data_provenance(cfg["data"]) if cfg["model"]["kind"] == "pretrained" else {}
    origin = provenance(command=sys.argv, config=cfg, extra={"data": data, **extra})
    write_json(output_dir / "provenance.json", origin)


def conditions_of(
    cfg: Mapping[str, Any], pair: ModelPair, num_prompts: int, cut: int, repeats: int
) -> dict[str, Any]:
    clock, model, models = cfg.get("clock", {}), cfg["model"], pair.section()
    roles = ("target", "draft", *(["translated"] if models.get("translated") else []))
    names = {role: models.get(role) for role in roles}
    for role, path in names.items():  # of a path only its last folder is shown
        names[role] = Path(path).name if path and Path(path).expanduser().exists() else path
    conditions: dict[str, Any] = {
        "clock": clock.get("kind", "measured"),
        **names,
        "data": cfg["data"]["name"] if pair.tokenizer is not None else "random tokens",
        "num_prompts": num_prompts,
        "prompts_truncated": cut,
        "max_new_tokens": cfg["max_new_tokens"],
        "sampling": (cfg.get("choices") or {}).get("sampling", cfg["sampling"]),
        "seed": cfg["seed"],
        "batch_size": cfg["batch_size"],
        "model": model["kind"],
        "dtype": pair.dtype if "dtype" in model else None,
        "quantization": models.get("quantization"),
        "backend": pair.backend,
        "threads": torch.get_num_threads(),
        "repeats": repeats,
    }
    if getattr(pair.tokenizer, "chat_template", None) and cfg["data"].get("chat") != "never":
        conditions["chat_template"] = True
    if "profile" in clock and "_target_" not in clock:
        conditions |= {"clock_profile": clock["profile"], "clock_scale": clock["scale"]}
    return conditions | pair.conditions()


def with_pair(cfg: Mapping[str, Any], pair: ModelPair) -> dict[str, Any]:
    choices = {**(cfg.get("choices") or {}), "model": type(pair).__name__}
    return {**cfg, "model": pair.section(), "choices": choices}


def notes_on_models(cfgs: Sequence[Mapping[str, Any]], pair: ModelPair) -> list[str]:
    notes = []
    if conditions := pair.conditions():
        # A replay has the data and sampling of its record, not the configuration's.
        about = {k: v for k, v in conditions.items() if isinstance(v, str) and k != "replay"}
        shown = ", ".join(f"{key}={value}" for key, value in about.items()) or "an acceptance trace"
        notes.append(f"model={pair.option} plays what was recorded: {shown}")
    flags = {"bfloat16": ("bf16",), "float16": ("fp16", "fphp")}.get(str(pair.dtype), ())
    known = cpu_info() if flags and pair.device == "cpu" else ""
    if known and not any(flag in known for flag in flags):
        notes.append(
            f"model.dtype={pair.dtype}: this CPU has no instructions for it, so prompts and passes"
            " are slow; model.dtype=float32 may be quicker"
        )
    rows: dict[str, list[str]] = {}
    for cfg in cfgs:
        for limit in limits(cfg, pair.device):
            rows.setdefault(limit, []).append(cfg["strategy"]["name"])
    return [*notes, *(f"{', '.join(names)}: {limit}" for limit, names in rows.items())]


def note_levels_on_one_stage(runners: Sequence[Runner], note: Callable[[str], None]) -> None:
    for runner in runners:
        parts = runner.parts
        if parts is not None and parts.executor.latency == parts.policy.levels_per_step == 1:
            note(
                f"{runner.name} feeds one tree level per step, and on one stage a step yields one"
                " token, as plain decoding does: use executor=pipeline with executor.stages=2 or"
                " more, or strategy=best_first, which verifies a whole tree at once"
            )


def limits(config: Mapping[str, Any], device: str) -> list[str]:
    """Returns why options for faster passes have no effect, as sentences without a full stop."""
    model = config["model"]
    graphs = str(model.get("graphs", "off"))
    captures = graphs in ("cuda", "replay") or (graphs == "auto" and device.startswith("cuda"))
    options = [f"model.graphs={graphs}"] if captures else []
    if model.get("kernels", "torch") != "torch":
        options.append(f"model.kernels={model['kernels']}")
    unused = f"{', '.join(options)}: not used"
    if not options:
        return []
    if config["strategy"]["kind"] != "parts":
        return [f"{unused} by another program, which runs its own passes"]
    notes = []
    executor, kv_tokens = config["executor"], config["serving"].get("kv_tokens")
    degrees = {key: executor.get(key) or 1 for key in ("target_degree", "draft_degree")}
    shared = ", ".join(f"executor.{key}={degree}" for key, degree in degrees.items() if degree > 1)
    if shared and executor.get("transport") == "distributed":
        notes.append(
            f"{unused} for shares of a tensor-parallel group ({shared}), which run uncaptured and"
            " unfused"
        )
    if captures and kv_tokens is not None:
        notes.append(
            f"model.graphs={graphs}: not used for the target, whose paged caches"
            f" (serving.kv_tokens={kv_tokens}) have no fixed addresses"
        )
    return notes
