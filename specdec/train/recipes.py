"""The recipes of the tokenizer and the target; those of the draft and the n-gram are in draft.py.

Each takes plain values (the keys of conf/train/*.yaml) and writes two places: `work_dir` for
token streams and checkpoints, `output_dir` for what is shipped. A run that stops half-way goes on
from its checkpoint when the same command is given again.
"""

from __future__ import annotations

import json
import platform
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from tokenizers import Tokenizer

from specdec.errors import UserError
from specdec.files import write_bytes, write_json
from specdec.train.corpus import EVALUATED, Corpus, build_corpus
from specdec.train.keys import made_of
from specdec.train.lm import Pretraining, Report
from specdec.train.model import LanguageModel, ModelShape, load_hf, save_hf
from specdec.train.parallel import rank_and_size, spawned
from specdec.train.plan import RunPlan
from specdec.train.streams import Mixture, encode_corpus, load_streams, save_streams, stream_of
from specdec.train.tokenizer import END, save_tokenizer, tokenizer_texts, train_tokenizer

PRECISIONS = {"bf16": torch.bfloat16, "fp32": torch.float32}


def need(path: Path, recipe: str) -> Path:
    """The path.

    Raises:
        UserError: it is missing; names the recipe that makes it.
    """
    if not path.exists():
        raise UserError(f"{path} is missing: run `specdec train {recipe}` first")
    return path


def need_model(folder: Path, recipe: str) -> Path:
    """A model's folder, with weights and tokenizer; otherwise as ``need``."""
    for name in ("model.safetensors", "tokenizer.json"):
        need(folder / name, recipe)
    return folder


def need_streams(work: Path, model: Path | None = None) -> dict[str, np.ndarray]:
    """The token streams of a work folder, in the tokenizer of a model where one is given.

    Raises:
        UserError: they are missing, or encoded by another tokenizer.
    """
    recipe = "tokenizer" if model is None else f"tokenizer tokenizer={model} work_dir={work}"
    path, used = need(work / "tokens.npz", recipe), work / "tokenizer.json"
    if model is not None and used.exists() and not _same_json(used, model / "tokenizer.json"):
        raise UserError(
            f"{path} is encoded by another tokenizer than {model}'s: run `specdec train {recipe}`"
            " with another work_dir"
        )
    return load_streams(path)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Puts the tokenizer that a model's text was encoded by beside the model."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (source / name).exists():
            write_bytes(folder / name, (source / name).read_bytes())


def _same_json(one: Path, other: Path) -> bool:
    return bool(json.loads(one.read_text("utf-8")) == json.loads(other.read_text("utf-8")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    """A trained model and what its continuations are made of.

    Attributes:
        model: of the family's format.
        tokenizer: its own.
        streams: token arrays in that tokenizer.
    """

    model: LanguageModel
    tokenizer: Tokenizer
    streams: dict[str, np.ndarray]


def read_teacher(
    work: Path,
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    compiled: bool = False,
) -> Teacher:
    """The model in a folder, named as the recipe that makes it, and the streams in ``work``.

    Raises:
        UserError: a file is missing, or model and streams do not belong together.
    """
    need_model(folder, folder.name)
    streams = need_streams(work, folder)
    model = load_hf(folder, dtype=dtype, compiled=compiled).to(device)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return Teacher(model=model, tokenizer=tokenizer, streams=streams)


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
        raise UserError(f"precision must be one of {sorted(PRECISIONS)}, got {precision!r}")
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
        "kept_out": corpus.kept_out,
        "streams": {
            name: {"tokens": len(ids), "bytes": stream_bytes[name]} for name, ids in streams.items()
        },
        "held_out_files": [d.path for d in corpus.held_out],
    }


def make_tokenizer(
    *,
    work_dir: str,
    output_dir: str,
    tokenizer: str | None,
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

    Writes the tokenizer into output_dir/target and output_dir/draft, output_dir/corpus.json and,
    into work_dir, tokens.npz and the tokenizer that it is encoded by. With ``tokenizer``, the
    folder of one that is there already, output_dir stays as it is. Arguments:
    conf/train/tokenizer.yaml; report(progress, line) as elsewhere.

    Raises:
        UserError: models of another tokenizer lie in output_dir, or ``tokenizer`` is none of this
            kind.
    """
    work, out = Path(work_dir), Path(output_dir)
    kept = None if tokenizer is None else _read_tokenizer(Path(tokenizer))
    report(0.0, "reading source files")
    corpus = build_corpus(packages=packages, gsm8k_mb=gsm8k_mb, copy_threshold=copy_threshold)
    report(0.4, f"{len(corpus.train)} documents; {told_of(corpus)}")
    if kept is None:
        found = train_tokenizer(tokenizer_texts(corpus, merges_mb), vocab_size)
        _refuse_other_models(found, out)
    else:
        found = kept
    report(0.6, "encoding")
    streams = encode_corpus(corpus, found, seed)
    save_streams(streams, work / "tokens.npz")
    save_tokenizer(found, work, max_positions)
    if kept is None:
        for part in ("target", "draft"):
            save_tokenizer(found, out / part, max_positions)
        write_json(out / "corpus.json", describe_corpus(corpus, streams))
    report(1.0, f"{sum(map(len, streams.values()))} tokens")


def told_of(corpus: Corpus) -> str:
    """Which evaluation text was kept out, and that of which sets was not, for want of the sets."""
    absent = [name for name in EVALUATED if name not in corpus.kept_out]
    kept = f"text of {', '.join(corpus.kept_out) or 'no evaluation set'} kept out"
    return f"{kept}; not at hand (SPECDEC_DATA): {', '.join(absent)}" if absent else kept


def _read_tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.exists():
        raise UserError(f"tokenizer={folder} holds no tokenizer.json")
    found = Tokenizer.from_file(str(path))
    if found.token_to_id(END) != 0:
        raise UserError(f"tokenizer={folder} must have {END!r}, which separates texts, as id 0")
    return found


def _refuse_other_models(learnt: Tokenizer, out: Path) -> None:
    for folder in (out / "target", out / "draft"):
        used = folder / "tokenizer.json"
        if (folder / "model.safetensors").exists() and not (
            used.exists() and json.loads(used.read_text("utf-8")) == json.loads(learnt.to_str())
        ):
            raise UserError(
                f"{folder} holds a model of another tokenizer than the one just learnt: give"
                f" tokenizer={folder} to keep that model's, or another output_dir and work_dir for"
                " a new family"
            )


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
        "machine": f"{platform.machine()}, {run.device.type}, {rank_and_size()[1]} processes of"
        f" {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "windows": sorted({phase.length for phase in run.plan.phases}),
        "held_out_window": run.plan.eval_length,
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
    streams, schedule = need_streams(work), RunPlan.of(plan)
    sizes = _shape(shape, schedule, streams)
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
    copy_tokenizer(work, out / "target")
    record_run(run, out / "target" / "training.json")


def _shape(sizes: dict[str, int], schedule: RunPlan, streams: dict[str, np.ndarray]) -> ModelShape:
    """The model at the first phase.

    Raises:
        UserError: no depth is given, or the vocabulary is smaller than the streams'.
    """
    depth = schedule.phases[0].layers
    if depth is None:
        raise UserError("plan.phases: the first phase must give `layers`, the depth to begin with")
    shape = made_of(ModelShape, sizes, "shape", num_layers=depth)
    largest = max(int(ids.max(initial=0)) for ids in streams.values())
    if largest >= shape.vocab_size:
        raise UserError(
            f"shape.vocab_size={shape.vocab_size}, but the token streams hold id {largest}"
        )
    return shape
