"""The recipes of the tokenizer and the target; those of the draft and the n-gram are in draft.py.

Each takes plain values (the keys of conf/train/*.yaml) and writes two places: `work_dir` for
token streams and checkpoints, `output_dir` for what is shipped. A run that stops half-way goes on
from its checkpoint when the same command is given again.
"""

from __future__ import annotations

import json
import platform
from collections import defaultdict
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from specdec.train.corpus import Corpus, build_corpus
from specdec.train.lm import Phase, Pretraining, Report, RunPlan
from specdec.train.model import LanguageModel, ModelShape, save_hf
from specdec.train.parallel import rank_and_size, spawned
from specdec.train.streams import Mixture, encode_corpus, load_streams, save_streams, stream_of
from specdec.train.tokenizer import save_tokenizer, tokenizer_texts, train_tokenizer

PRECISIONS = {"bf16": torch.bfloat16, "fp32": torch.float32}


def write_json(path: Path, value: object) -> None:
    """Writes indented JSON; the folder is created where absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n")


def need(path: Path, recipe: str) -> Path:
    """The path, or FileNotFoundError naming the recipe that makes it."""
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: run `specdec train {recipe}` first")
    return path


def pick_device(name: str) -> torch.device:
    """A device by name; "auto" is a GPU where there is one (one each in a group), else the CPU."""
    rank, size = rank_and_size()
    if name == "auto" and size > 1:
        return torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if name != "auto":
        return torch.device(name)
    return Accelerator().device


def set_up(num_threads: int, precision: str) -> torch.dtype:
    """Sets CPU threads (0 leaves torch's choice) and returns the dtype of a precision's name."""
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {sorted(PRECISIONS)}, got {precision!r}")
    if num_threads:
        torch.set_num_threads(num_threads)
    return PRECISIONS[precision]


def describe_corpus(corpus: Corpus, streams: dict[str, np.ndarray]) -> dict[str, Any]:
    """What the model card says of the data: sources, licences, counts, held-out files."""
    sources: dict[str, dict[str, Any]] = {}
    stream_bytes: dict[str, int] = defaultdict(int)
    for document in corpus.train:
        size = len(document.text.encode("utf-8"))
        stream_bytes[stream_of(document)] += size
        row = sources.setdefault(
            document.source,
            {"licence": corpus.licences[document.source], "files": 0, "bytes": 0, "functions": 0},
        )
        if document.kind == "functions":
            row["functions"] += size
        else:
            row["files"] += 1
            row["bytes"] += size
    stream_bytes["held_out"] = sum(len(d.text.encode("utf-8")) for d in corpus.held_out)
    return {
        "python": platform.python_version(),
        "sources": sources,
        "dropped": dict(corpus.dropped),
        "streams": {
            name: {"tokens": len(ids), "bytes": stream_bytes[name]} for name, ids in streams.items()
        },
        "held_out_files": [d.path for d in corpus.held_out],
    }


def make_tokenizer(
    *,
    work_dir: str,
    output_dir: str,
    packages: dict[str, float],
    gsm8k_mb: float,
    copy_threshold: float,
    vocab_size: int,
    merges_mb: float,
    max_positions: int,
    seed: int,
    report: Report,
) -> None:
    """Builds the corpus, learns the tokenizer, encodes the token streams.

    Writes the tokenizer into output_dir/target and output_dir/draft, output_dir/corpus.json and
    work_dir/tokens.npz. Arguments: conf/train/tokenizer.yaml; report(progress, line) as elsewhere.
    """
    work, out = Path(work_dir), Path(output_dir)
    report(0.0, "reading source files")
    corpus = build_corpus(packages=packages, gsm8k_mb=gsm8k_mb, copy_threshold=copy_threshold)
    report(0.4, f"{len(corpus.train)} documents; learning merges")
    tokenizer = train_tokenizer(tokenizer_texts(corpus, merges_mb), vocab_size)
    for part in ("target", "draft"):
        save_tokenizer(tokenizer, out / part, max_positions)
    report(0.6, "encoding")
    streams = encode_corpus(corpus, tokenizer, seed)
    save_streams(streams, work / "tokens.npz")
    write_json(out / "corpus.json", describe_corpus(corpus, streams))
    report(1.0, f"{sum(map(len, streams.values()))} tokens")


def make_plan(cfg: dict[str, Any]) -> RunPlan:
    """A RunPlan from plain values; unknown keys are a ValueError."""
    phases = tuple(Phase(**phase) for phase in cfg["phases"])
    known = {entry.name for entry in fields(RunPlan)}
    unknown = sorted(set(cfg) - known)
    if unknown:
        raise ValueError(f"unknown keys of a plan: {unknown}; known: {sorted(known)}")
    series = {name: tuple(cfg.get(name, ())) for name in ("restarts", "cycle_rates")}
    return RunPlan(**(cfg | {"phases": phases} | series))


def record_run(run: Pretraining, path: Path, extra: dict[str, Any] | None = None) -> None:
    """Writes training.json beside the weights: counts, time, machine, loss curve.

    Args:
        run: a finished run.
        path: the file.
        extra: more entries.
    """
    curve = run.state.curve or []
    kept = curve[:: max(1, len(curve) // 24)] + [row for row in curve[-1:] if len(curve) > 24]
    held = [row for row in curve if "held_out" in row]
    kept_held = held[:: max(1, len(held) // 12)]
    record = {
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "steps": run.state.step,
        "tokens": run.state.tokens,
        "minutes": round(run.state.seconds / 60, 1),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, {run.device.type}",
        "torch": torch.__version__,
        "curve": sorted({row["step"]: row for row in kept + kept_held}.values(), key=_step),
    }
    write_json(path, record | (extra or {}))


def _step(row: dict[str, float]) -> float:
    return row["step"]


def train_target(
    *,
    work_dir: str,
    output_dir: str,
    shape: dict[str, int],
    weights: dict[str, float],
    plan: dict[str, Any],
    seed: int,
    precision: str,
    compiled: bool,
    num_threads: int,
    num_processes: int,
    device: str,
    report: Report,
) -> None:
    """Pre-trains the target on the token streams; needs make_tokenizer's output.

    Arguments: conf/train/target.yaml. Writes output_dir/target and work_dir/target.
    """
    if spawned(train_target, locals(), num_processes):
        return
    work, out = Path(work_dir), Path(output_dir)
    dtype = set_up(num_threads, precision)
    streams = load_streams(need(work / "tokens.npz", "tokenizer"))
    schedule = make_plan(plan)
    sizes = ModelShape(num_layers=schedule.phases[0].layers, **shape)
    generator = torch.Generator().manual_seed(seed)
    model = LanguageModel(sizes, generator=generator, dtype=dtype, compiled=compiled)
    run = Pretraining(
        model.to(pick_device(device)),
        Mixture(streams, weights, seed),
        schedule,
        work / "target",
        held_out=streams["held_out"],
        report=report,
        compiled=compiled,
    )
    trained = run.run()
    if rank_and_size()[0] != 0:
        return
    save_hf(trained, out / "target")
    record_run(run, out / "target" / "training.json")
