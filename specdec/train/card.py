"""The model card: measures the shipped family and fills card.md.j2."""

from __future__ import annotations

import json
import statistics
import time
from importlib import resources
from math import prod
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, StrictUndefined
from safetensors import safe_open
from tokenizers import Tokenizer

from specdec.data.stdlib import HELD_OUT_MODULUS
from specdec.files import write_json
from specdec.train.agreement import BATCH, RANKS, agreement_by_data, draft_ranks
from specdec.train.corpus import EVALUATED, held_out_files
from specdec.train.lm import Report, held_out_loss
from specdec.train.model import LanguageModel, load_hf
from specdec.train.recipes import need
from specdec.train.session import Session
from specdec.train.streams import encode


def make_card(
    session: Session,
    *,
    measure: bool,
    new_tokens: int,
    prompts: dict[str, int],
    length: int,
    reference: str | None,
) -> None:
    """Measures target and draft in output_dir and writes its README.md and measured.json.

    Without ``measure`` the page is written from an existing measured.json and the records of the
    runs. Absent data sets are skipped; the card names those that were measured. Arguments:
    conf/train/card.yaml.

    Raises:
        UserError: a model is missing, or measured.json where ``measure`` is false.
    """
    out, report = session.out, session.report
    if measure:
        measured = _measure(out, length, report)
        if reference is not None:
            report(0.2, f"held-out loss of {reference}")
            measured["reference"] = _measure_reference(Path(reference), length)
        measured["agreement"] = _measure_agreement(session, prompts, new_tokens)
        measured |= {"new_tokens": new_tokens, "batch": BATCH}
        write_json(out / "measured.json", measured)
    else:
        need(out / "measured.json", "card measure=true")
    text = render_card(out)
    (out / "README.md").write_text(text, encoding="ascii", errors="replace")
    report(1.0, "card written")


def render_card(folder: Path) -> str:
    """The model card of a family, from measured.json and the records of its runs."""
    environment = Environment(  # noqa: S701 - Markdown, not HTML
        trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined, keep_trailing_newline=True
    )
    environment.filters["fixed"] = lambda value, digits: f"{value:.{digits}f}"
    environment.filters["millions"] = lambda value, digits=2: f"{value / 1e6:.{digits}f}"
    template = resources.files("specdec.train").joinpath("card.md.j2").read_text("utf-8")
    target, corpus = _read(folder / "target" / "training.json"), _read(folder / "corpus.json")
    rounds = target.get("finish", {}).get("rounds", ())
    return environment.from_string(template).render(
        measured=_read(folder / "measured.json"),
        target=target,
        draft=_read(folder / "draft" / "training.json"),
        corpus=corpus,
        ranks=RANKS,
        held_out_modulus=HELD_OUT_MODULUS,
        finish_windows=sorted({length for one in rounds for length in one.get("windows", ())}),
        kept_out=corpus.get("kept_out", list(EVALUATED)),  # older records excluded all
        **_heads(folder / "heads"),
    )


def _heads(folder: Path) -> dict[str, Any]:
    """The template's values for the heads: sizes, sampled agreement by data set, runs."""
    rows = [row for path in sorted(folder.glob("measured-*.json")) for row in _read(path)]
    rows = [row for row in rows if row["sampling"] != "greedy"]
    rates = {(row["head"], row["data"]): row["outside"][0] for row in rows}
    data = list(dict.fromkeys(row["data"] for row in rows))
    heads = []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
        by_data = [rates.get((path.stem, name)) for name in data]
        heads.append({"name": path.stem, "parameters": sum(map(prod, shapes)), "rates": by_data})
    return {
        "heads": heads,
        "head_data": data,
        "head_sampling": rows[0]["sampling"] if rows else "",
        "head_runs": [_read(path) for path in sorted(folder.glob("training-*.json"))],
    }


def _read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else {}


def measure_loss(model: LanguageModel, tokenizer: Tokenizer, length: int) -> dict[str, float]:
    """Held-out loss in nats per token and per byte, with the numbers of tokens and bytes."""
    texts = [text for _, text in held_out_files()]
    ids = encode(tokenizer, texts)
    size = sum(len(text.encode("utf-8")) for text in texts)
    loss = held_out_loss(model, ids, length)
    return {
        "per_token": loss,
        "per_byte": loss * len(ids) / size,
        "tokens": len(ids),
        "bytes": size,
    }


def pass_ms(folder: Path, prefix: int = 128, repeats: int = 60) -> float:
    """Median milliseconds of one transformers forward of one token after a cached prefix.

    Float32 on the CPU, the library's default for this family.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, model.config.vocab_size, (1, prefix), generator=generator)
    times = []
    with torch.inference_mode():
        cache = model(tokens, use_cache=True).past_key_values
        for _ in range(repeats):
            began = time.perf_counter()
            cache = model(tokens[:, :1], past_key_values=cache, use_cache=True).past_key_values
            times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


def _tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def _measure(out: Path, length: int, report: Report) -> dict[str, Any]:
    """Held-out loss and time of a pass of target and draft."""
    measured: dict[str, Any] = {"loss_window": length}
    for part in ("target", "draft"):
        need(out / part / "model.safetensors", part)
    for part in ("target", "draft"):
        report(0.1, f"held-out loss of the {part}")
        measured[part] = measure_loss(load_hf(out / part), _tokenizer(out / "target"), length)
        measured[part]["pass_ms"] = pass_ms(out / part)
    return measured


def _measure_agreement(
    session: Session, prompts: dict[str, int], new_tokens: int
) -> list[dict[str, Any]]:
    out = session.out
    target, draft = load_hf(out / "target"), load_hf(out / "draft")
    rows: list[dict[str, Any]] = []
    for (row,) in agreement_by_data(
        target, draft_ranks(draft), _tokenizer(out / "target"), prompts, new_tokens, session.seed
    ):
        progress = 0.3 + 0.7 * len(rows) / (2 * len(prompts))
        session.report(progress, f"{row['data']}, {row['sampling']}")
        rows.append(row)
    return rows


def _measure_reference(folder: Path, length: int) -> dict[str, float]:
    """Held-out loss of another Llama of the same format, under its own tokenizer."""
    model = load_hf(folder)
    measured = measure_loss(model, _tokenizer(folder), length)
    measured["parameters"] = sum(weight.numel() for weight in model.parameters())
    measured["layers"] = model.shape.num_layers
    return measured
