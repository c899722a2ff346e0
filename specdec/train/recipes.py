"""The recipes of the tokenizer and the target, and what all recipes share.

A recipe takes a Session and plain values (the other keys of conf/train/NAME.yaml). An interrupted
run resumes from its checkpoint when the same command is given again.
"""

from __future__ import annotations

import json
import platform
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from tokenizers import Tokenizer

from specdec.errors import UserError
from specdec.files import write_bytes, write_json
from specdec.parts.build import build
from specdec.parts.fields import PositiveShare
from specdec.train.corpus import EVALUATED, Corpus, build_corpus
from specdec.train.lm import Pretraining
from specdec.train.model import LanguageModel, ModelShape, save_hf
from specdec.train.parallel import rank_and_size
from specdec.train.plan import RunPlan
from specdec.train.session import Session
from specdec.train.streams import Mixture, encode_corpus, load_streams, save_streams, stream_of
from specdec.train.tokenizer import END, save_tokenizer, tokenizer_texts, train_tokenizer


def need(path: Path, recipe: str) -> Path:
    """Returns the path.

    Raises:
        UserError: it does not exist; the message names the recipe that writes it.
    """
    if not path.exists():
        raise UserError(f"{path} is missing: run `specdec train {recipe}` first")
    return path


def need_streams(work: Path, model: Path | None = None) -> dict[str, np.ndarray]:
    """Reads a work folder's token streams, by the tokenizer of a model's folder if one is given.

    Raises:
        UserError: they are missing, or another tokenizer encoded them.
    """
    recipe = "tokenizer" if model is None else f"tokenizer tokenizer={model} work_dir={work}"
    path, used = need(work / "tokens.npz", recipe), work / "tokenizer.json"
    if model and used.exists() and _read_json(used) != _read_json(model / "tokenizer.json"):
        raise UserError(
            f"{path} is encoded by another tokenizer than {model}'s: run `specdec train {recipe}`"
            " with another work_dir"
        )
    return load_streams(path)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copies the tokenizer's files, where they exist, into a model's folder."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (source / name).exists():
            write_bytes(folder / name, (source / name).read_bytes())


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    """A trained model and the data for its continuations.

    Attributes:
        model: the model.
        tokenizer: its tokenizer.
        streams: token arrays in that tokenizer.
    """

    model: LanguageModel
    tokenizer: Tokenizer
    streams: dict[str, np.ndarray]


def read_teacher(session: Session, part: str = "target") -> Teacher:
    """Reads the model output_dir/part and the token streams for it.

    Args:
        session: folders and machine.
        part: the model's folder, which has the name of the recipe that writes it.

    Raises:
        UserError: a file is missing, or model and streams have different tokenizers.
    """
    folder = session.out / part
    for name in ("model.safetensors", "tokenizer.json"):
        need(folder / name, part)
    streams = need_streams(session.work, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return Teacher(model=session.load(folder), tokenizer=tokenizer, streams=streams)


def describe_corpus(corpus: Corpus, streams: dict[str, np.ndarray]) -> dict[str, Any]:
    """The record of the data for the model card: sources, licences, counts, held-out files."""
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
    session: Session,
    *,
    tokenizer: str | None,
    packages: dict[str, float],
    gsm8k_mb: float,
    copy_threshold: PositiveShare,
    vocab_size: Annotated[int, Field(ge=257)],
    merges_mb: float,
    max_positions: int,
) -> None:
    """Builds the corpus, trains a tokenizer unless one is given, encodes the token streams.

    Writes tokens.npz and the tokenizer into work_dir; a new tokenizer also into output_dir/target
    and output_dir/draft, with output_dir/corpus.json. With ``tokenizer``, the folder of an existing
    one, output_dir is not changed. Arguments: conf/train/tokenizer.yaml.

    Raises:
        UserError: output_dir has models of another tokenizer, or ``tokenizer`` cannot be used.
    """
    work, out, report = session.work, session.out, session.report
    existing = None if tokenizer is None else _read_tokenizer(Path(tokenizer))
    report(0.0, "reading source files")
    corpus = build_corpus(packages=packages, gsm8k_mb=gsm8k_mb, copy_threshold=copy_threshold)
    report(0.4, f"{len(corpus.train)} documents; {excluded_sets(corpus)}")
    used = existing
    if used is None:
        used = train_tokenizer(tokenizer_texts(corpus, merges_mb), vocab_size)
        _refuse_other_models(used, out)
    report(0.6, "encoding")
    streams = encode_corpus(corpus, used, session.seed)
    save_streams(streams, work / "tokens.npz")
    save_tokenizer(used, work, max_positions)
    if existing is None:
        for part in ("target", "draft"):
            copy_tokenizer(work, out / part)
        write_json(out / "corpus.json", describe_corpus(corpus, streams))
    report(1.0, f"{sum(map(len, streams.values()))} tokens")


def excluded_sets(corpus: Corpus) -> str:
    """Which evaluation sets' text was excluded, and which sets were not available."""
    absent = [name for name in EVALUATED if name not in corpus.kept_out]
    excluded = f"text of {', '.join(corpus.kept_out) or 'no evaluation set'} excluded"
    return f"{excluded}; not available (SPECDEC_DATA): {', '.join(absent)}" if absent else excluded


def _read_tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.exists():
        raise UserError(f"tokenizer={folder} holds no tokenizer.json")
    tokenizer = Tokenizer.from_file(str(path))
    if tokenizer.token_to_id(END) != 0:
        raise UserError(f"tokenizer={folder} must have {END!r}, which separates texts, as id 0")
    return tokenizer


def _refuse_other_models(tokenizer: Tokenizer, out: Path) -> None:
    for folder in (out / "target", out / "draft"):
        used = folder / "tokenizer.json"
        if (folder / "model.safetensors").exists() and not (
            used.exists() and _read_json(used) == json.loads(tokenizer.to_str())
        ):
            raise UserError(
                f"{folder} holds a model of another tokenizer than the new one: give"
                f" tokenizer={folder} to use that model's, or another output_dir and work_dir for"
                " a new family"
            )


def train_and_save(
    run: Pretraining, folder: Path, tokenizer: Path, extra: dict[str, Any] | None = None
) -> None:
    """Trains a LanguageModel to the end of a run and writes it into a folder.

    Process 0 writes; the folder also gets the tokenizer of the folder `tokenizer` and training.json
    (see record_run).
    """
    trained = run.run()
    if rank_and_size()[0] == 0:
        save_hf(trained, folder)
        copy_tokenizer(tokenizer, folder)
        record_run(run, folder / "training.json", extra)


def record_run(run: Pretraining, path: Path, extra: dict[str, Any] | None = None) -> None:
    """Writes the record of a finished run: counts, time, machine, loss curve, extra entries."""
    curve = run.state.curve
    held_out = [row for row in curve if "held_out" in row]
    thinned = [*curve[:: max(1, len(curve) // 24)], *held_out[:: max(1, len(held_out) // 12)]]
    if len(curve) > 24:
        thinned.append(curve[-1])
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
        "curve": [row for _, row in sorted({row["step"]: row for row in thinned}.items())],
    }
    write_json(path, record | (extra or {}))


def train_target(
    session: Session, *, shape: dict[str, Any], weights: dict[str, float], plan: dict[str, Any]
) -> None:
    """Trains the target on the token streams that make_tokenizer wrote.

    Writes output_dir/target and work_dir/target. Arguments: conf/train/target.yaml.
    """
    streams, schedule = need_streams(session.work), RunPlan.of(plan)
    model = LanguageModel(
        _shape(shape, schedule, streams),
        generator=torch.Generator().manual_seed(session.seed),
        compute_dtype=session.dtype,
        compiled=session.compiled,
    )
    run = Pretraining(
        model.to(session.place),
        Mixture(streams, weights, session.seed),
        schedule,
        session.work / "target",
        held_out=streams["held_out"],
        report=session.report,
    )
    train_and_save(run, session.out / "target", tokenizer=session.work)


def _shape(sizes: dict[str, Any], schedule: RunPlan, streams: dict[str, np.ndarray]) -> ModelShape:
    """Sizes of the model in the first phase.

    Raises:
        UserError: the first phase gives no depth, or the vocabulary is smaller than the streams'.
    """
    depth = schedule.phases[0].layers
    if depth is None:
        raise UserError("plan.phases: the first phase must give `layers`, the initial depth")
    shape = build(ModelShape, sizes, "shape", num_layers=depth)
    largest = max(int(ids.max(initial=0)) for ids in streams.values())
    if largest >= shape.vocab_size:
        raise UserError(
            f"shape.vocab_size={shape.vocab_size}, but the token streams hold id {largest}"
        )
    return shape
