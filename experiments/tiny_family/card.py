from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from safetensors.torch import load_file
from tokenizers import Tokenizer

from experiments.tiny_family.agreement import BATCH, RANKS, SETTINGS, agreement_by_data
from experiments.tiny_family.corpus import EVALUATED, held_out_files
from experiments.tiny_family.lm import held_out_loss
from experiments.tiny_family.model import LanguageModel, load_hf
from experiments.tiny_family.recipes import need
from experiments.tiny_family.session import Session
from experiments.tiny_family.streams import encode
from specdec.data.files import read_json
from specdec.data.stdlib import HELD_OUT_MODULUS
from specdec.files import write_json
from specdec.models.slicing import cache_argument


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

    Without ``measure`` the page is written from an existing measured.json. Absent data sets are
    skipped; the card names those that were measured. Arguments: card.yaml.
    """
    out, report = session.out, session.report
    if measure:
        for part in ("target", "draft"):
            need(out / part / "model.safetensors", part)
        tokenizer, models = Tokenizer.from_file(str(out / "target" / "tokenizer.json")), {}
        measured: dict[str, Any] = {"loss_window": length}
        for part in ("target", "draft"):
            report(0.1, f"held-out loss of the {part}")
            models[part] = load_hf(out / part)
            measured[part] = _held_out(models[part], tokenizer, length)
            measured[part]["pass_ms"] = _pass_ms(out / part)
        if reference is not None:
            report(0.2, f"held-out loss of {reference}")
            other, own = load_hf(Path(reference)), f"{reference}/tokenizer.json"
            measured["reference"] = {
                **_held_out(other, Tokenizer.from_file(own), length),
                "parameters": other.num_parameters(),
                "layers": other.shape.num_layers,
            }
        target, draft = models.values()
        rows: list[dict[str, Any]] = []
        for (row,) in agreement_by_data(
            target, lambda ids: [(0, draft(ids)[0])], tokenizer, prompts, new_tokens, session.seed
        ):
            progress = 0.3 + 0.7 * len(rows) / (len(SETTINGS) * len(prompts))
            report(progress, f"{row['data']}, {row['sampling']}")
            rows.append(row)
        measured |= {"agreement": rows, "new_tokens": new_tokens, "batch": BATCH}
        write_json(out / "measured.json", measured)
    need(out / "measured.json", "card measure=true")
    (out / "README.md").write_text(render_card(out), encoding="ascii", errors="replace")
    report(1.0, "card written")


def render_card(folder: Path) -> str:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters["fixed"] = lambda value, digits: f"{value:.{digits}f}"
    environment.filters["millions"] = lambda value, digits=2: f"{value / 1e6:.{digits}f}"
    paths = ("measured.json", "target/training.json", "draft/training.json", "corpus.json")
    texts = [read_json(folder / p) if (folder / p).exists() else {} for p in paths]
    heads, eagle = folder / "heads", folder / "eagle3"
    files = {path.stem: load_file(path).values() for path in sorted(heads.glob("*.safetensors"))}
    measured_heads = [read_json(path) for path in sorted(heads.glob("measured-*.json"))]
    return environment.get_template("card.md.j2").render(
        **dict(zip(("measured", "target", "draft", "corpus"), texts, strict=True)),
        ranks=RANKS,
        held_out_modulus=HELD_OUT_MODULUS,
        evaluated=list(EVALUATED),
        head_parameters={name: sum(w.numel() for w in file) for name, file in files.items()},
        head_rows=[row for rows in measured_heads for row in rows],
        eagle=_eagle(eagle) if (eagle / "training.json").exists() else None,
        head_runs=[read_json(path) for path in sorted(heads.glob("training-*.json"))],
    )


def _eagle(folder: Path) -> dict[str, Any]:
    size = (folder / "model.safetensors").stat().st_size
    measured = folder / "measured.json"
    rows = read_json(measured) if measured.exists() else []  # not of `specdec train eagle3`
    return {**read_json(folder / "training.json"), "bytes": size, "rows": rows}


def _held_out(model: LanguageModel, tokenizer: Tokenizer, length: int) -> dict[str, Any]:
    texts = [text for _, text in held_out_files()]
    ids, size = encode(tokenizer, texts), sum(len(text.encode("utf-8")) for text in texts)
    loss = held_out_loss(model, ids, length)
    per_byte = loss * len(ids) / size
    return {"per_token": loss, "per_byte": per_byte, "tokens": len(ids), "bytes": size}


def _pass_ms(folder: Path, prefix: int = 128, repeats: int = 60) -> float:
    """Returns the median ms of a transformers forward of one token, in float32 on the CPU."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    name = cache_argument(model)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, model.config.vocab_size, (1, prefix), generator=generator)
    times = []
    with torch.inference_mode():
        cache = getattr(model(tokens, use_cache=True), name)
        for _ in range(repeats):
            began = time.perf_counter()
            cache = getattr(model(tokens[:, :1], use_cache=True, **{name: cache}), name)
            times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)
