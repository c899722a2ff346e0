"""The recipes of the tokenizer and the target, and what all recipes share.

A recipe takes a Session and plain values (the other keys of NAME.yaml). An interrupted
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

from experiments.tiny_family.corpus import EVALUATED, Corpus, build_corpus
from experiments.tiny_family.lm import Pretraining
from experiments.tiny_family.model import LanguageModel, ModelShape, save_hf
from experiments.tiny_family.plan import RunPlan, build
from experiments.tiny_family.session import Session
from experiments.tiny_family.streams import Mixture, encode_corpus, load_streams, save_streams
from experiments.tiny_family.tokenizer import END, save_tokenizer, tokenizer_texts, train_tokenizer
from specdec.data.files import read_json
from specdec.errors import UserError
from specdec.files import write_bytes, write_json
from specdec.parts.fields import PositiveShare


def need(path: Path, recipe: str) -> Path:
    """Returns the path if it exists; the error names the recipe that writes it."""
    if not path.exists():
        raise UserError(f"{path} is missing: run the recipe `{recipe}` first")
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
            f"{path} is encoded by another tokenizer than {model}'s: run the recipe `{recipe}`"
            " with another work_dir"
        )
    return load_streams(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    model: LanguageModel
    tokenizer: Tokenizer
    streams: dict[str, np.ndarray]


def read_teacher(session: Session, part: str = "target") -> Teacher:
    folder = session.out / part
    for name in ("model.safetensors", "tokenizer.json"):
        need(folder / name, part)
    streams = need_streams(session.work, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return Teacher(model=session.load(folder), tokenizer=tokenizer, streams=streams)


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
    and output_dir/draft, with output_dir/corpus.json. Arguments: tokenizer.yaml.
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
    if tokenizer.token_to_id(END) != 0:
        raise UserError(f"tokenizer={folder} must have {END!r}, which separates texts, as id 0")
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
    """Trains to the end of a run, writes its record and then calls ``save``."""
    model = run.run()
    curve = run.state.curve
    held_out = [row for row in curve if "held_out" in row]
    kept = [*curve[:: max(1, len(curve) // 24)], *curve[-1:]]
    kept += held_out[:: max(1, len(held_out) // 12)]
    values = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": run.state.step,
        "tokens": run.state.tokens,
        "minutes": round(run.state.seconds / 60, 1),
        "machine": f"{platform.machine()}, {model.device.type}, {torch.get_num_threads()} threads",
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

    Writes output_dir/target and work_dir/target. Arguments: target.yaml.
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
