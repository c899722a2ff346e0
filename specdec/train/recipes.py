"""The recipes of the tokenizer and the target, and what all recipes share.

A recipe takes a Session and plain values (the other keys of conf/train/NAME.yaml). An interrupted
run resumes from its checkpoint when the same command is given again.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from tokenizers import Tokenizer

from specdec.data.files import read_json
from specdec.errors import UserError
from specdec.files import write_bytes, write_json
from specdec.parts.fields import PositiveShare
from specdec.train.corpus import EVALUATED, Corpus, build_corpus
from specdec.train.lm import Pretraining
from specdec.train.model import LanguageModel, ModelShape, save_hf
from specdec.train.plan import RunPlan
from specdec.train.sections import build
from specdec.train.session import Session, rank_and_size
from specdec.train.streams import Mixture, encode_corpus, load_streams, save_streams
from specdec.train.target import end_ids, load_target
from specdec.train.tokenizer import END, save_tokenizer, tokenizer_texts, train_tokenizer


def need(path: Path, recipe: str) -> Path:
    """Returns the path if it exists; the error names the recipe that writes it."""
    if not path.exists():
        raise UserError(f"{path} is missing: run `specdec train {recipe}` first")
    return path


def _same(first: Path, second: Path) -> bool:
    """Whether two tokenizer.json describe one tokenizer, even if their versions differ."""
    one, other = (json.loads(Tokenizer.from_file(str(p)).to_str()) for p in (first, second))
    return bool(one == other)


def need_streams(work: Path, model: Path | None = None) -> dict[str, np.ndarray]:
    """Reads a work folder's token streams, which the tokenizer of ``model`` must have encoded."""
    recipe = "tokenizer" if model is None else f"tokenizer tokenizer={model} work_dir={work}"
    path, used = need(work / "tokens.npz", recipe), work / "tokenizer.json"
    if model and used.exists() and not _same(used, model / "tokenizer.json"):
        raise UserError(
            f"{path} is encoded by another tokenizer than {model}'s: run `specdec train {recipe}`"
            " with another work_dir"
        )
    return load_streams(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    model: Any  # a LanguageModel, or the Target of ``read_frozen``
    tokenizer: Tokenizer
    streams: dict[str, np.ndarray]


def read_teacher(session: Session, part: str = "target") -> Teacher:
    folder = session.out / part
    for name in ("model.safetensors", "tokenizer.json"):
        need(folder / name, part)
    streams = need_streams(session.work, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return Teacher(model=session.load(folder), tokenizer=tokenizer, streams=streams)


def read_frozen(session: Session) -> Teacher:
    """Reads output_dir/target, of any family, for training heads, and its token streams."""
    folder = session.out / "target"
    if not (folder / "model.safetensors.index.json").exists():
        need(folder / "model.safetensors", "target")
    need(folder / "tokenizer.json", "target")
    streams = need_streams(session.work, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return Teacher(model=load_target(session, folder), tokenizer=tokenizer, streams=streams)


def _describe(corpus: Corpus, streams: dict[str, np.ndarray]) -> dict[str, Any]:
    sources = {}
    for name, licence in corpus.licences.items():
        own = [d for d in corpus.train if d.source == name]
        whole = [d.size for d in own if d.kind != "functions"]
        functions = sum(d.size for d in own if d.kind == "functions")
        row = {"licence": licence, "files": len(whole), "bytes": sum(whole)}
        if own:
            sources[name] = {**row, "functions": functions}
    documents = corpus.streams()
    return {
        "python": platform.python_version(),
        "sources": sources,
        "dropped": dict(corpus.dropped),
        "kept_out": corpus.kept_out,
        "streams": {
            name: {"tokens": len(ids), "bytes": sum(d.size for d in documents[name])}
            for name, ids in streams.items()
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
    and output_dir/draft, with output_dir/corpus.json. Arguments: conf/train/tokenizer.yaml.
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
    end = 0 if tokenizer is None else end_ids(Path(tokenizer))[0]
    streams = encode_corpus(corpus, used, session.seed, end)
    save_streams(streams, work / "tokens.npz")
    for folder in (work,) if existing else (work, out / "target", out / "draft"):
        save_tokenizer(used, folder, max_positions)
    if existing is None:
        write_json(out / "corpus.json", _describe(corpus, streams))
    report(1.0, f"{sum(map(len, streams.values()))} tokens")


def excluded_sets(corpus: Corpus) -> str:
    absent = [name for name in EVALUATED if name not in corpus.kept_out]
    excluded = f"text of {', '.join(corpus.kept_out) or 'no evaluation set'} excluded"
    return f"{excluded}; not available (SPECDEC_DATA): {', '.join(absent)}" if absent else excluded


def _read_tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.exists():
        raise UserError(f"tokenizer={folder} holds no tokenizer.json")
    tokenizer = Tokenizer.from_file(str(path))
    if not (folder / "config.json").exists() and tokenizer.token_to_id(END) != 0:
        raise UserError(
            f"tokenizer={folder} must have {END!r}, which separates texts, as id 0, or a"
            " config.json with eos_token_id beside it"
        )
    return tokenizer


def _refuse_other_models(tokenizer: Tokenizer, out: Path) -> None:
    for folder in (out / "target", out / "draft"):
        used = folder / "tokenizer.json"
        same = used.exists() and read_json(used) == json.loads(tokenizer.to_str())
        if (folder / "model.safetensors").exists() and not same:
            raise UserError(
                f"{folder} holds a model of another tokenizer than the new one: give"
                f" tokenizer={folder} to use that model's, or another output_dir and work_dir for"
                " a new family"
            )


def train_and_save(
    run: Pretraining,
    record: Path,
    save: Callable[[LanguageModel], None],
    extra: dict[str, Any] | None = None,
) -> None:
    """Trains to the end of a run; process 0 writes its record and then calls ``save``."""
    model = run.run()
    if rank_and_size()[0] != 0:
        return
    curve = run.state.curve
    held_out = [row for row in curve if "held_out" in row]
    kept = [*curve[:: max(1, len(curve) // 24)], *curve[-1:]]
    kept += held_out[:: max(1, len(held_out) // 12)]
    values = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": run.state.step,
        "tokens": run.state.tokens,
        "minutes": round(run.state.seconds / 60, 1),
        "machine": f"{platform.machine()}, {model.device.type}, {rank_and_size()[1]} processes of"
        f" {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "windows": sorted({phase.length for phase in run.plan.phases}),
        "held_out_window": run.plan.eval_length,
        "curve": [row for row in curve if row in kept],
    }
    write_json(record, values | (extra or {}))
    save(model)


def save_member(model: LanguageModel, folder: Path, tokenizer: Path) -> None:
    save_hf(model, folder)
    for path in (tokenizer / "tokenizer.json", tokenizer / "tokenizer_config.json"):
        if path.exists():
            write_bytes(folder / path.name, path.read_bytes())


def train_target(
    session: Session, *, shape: dict[str, Any], weights: dict[str, float], plan: dict[str, Any]
) -> None:
    """Trains the target on the token streams that make_tokenizer wrote.

    Writes output_dir/target and work_dir/target. Arguments: conf/train/target.yaml.
    """
    work, folder, seed = session.work / "target", session.out / "target", session.seed
    streams, schedule = need_streams(session.work), RunPlan.of(plan)
    depth = schedule.phases[0].layers
    if depth is None:
        raise UserError("plan.phases: the first phase must give `layers`, the initial depth")
    sizes = build(ModelShape, shape, "shape", num_layers=depth)
    largest = max(int(ids.max(initial=0)) for ids in streams.values())
    if largest >= sizes.vocab_size:
        raise UserError(
            f"shape.vocab_size={sizes.vocab_size}, but the token streams hold id {largest}"
        )
    model = LanguageModel(
        sizes,
        generator=torch.Generator().manual_seed(seed),
        compute_dtype=session.dtype,
        compiled=session.compiled,
    ).to(session.place)
    mixture, held_out = Mixture(streams, weights, seed), streams["held_out"]
    run = Pretraining(model, mixture, schedule, work, held_out=held_out, report=session.report)
    save = partial(save_member, folder=folder, tokenizer=session.work)
    train_and_save(run, folder / "training.json", save)
