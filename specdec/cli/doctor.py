"""``specdec doctor`` finds which reading of an EAGLE head's files its target accepts best."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.cli.arguments import Arguments, read_values
from specdec.errors import UserError
from specdec.models.config_values import config_value
from specdec.parts.fields import Count, Index, Text

if TYPE_CHECKING:
    from torch import Tensor

    from specdec.models.eagle_readings import Accepted, Reading
    from specdec.models.frozen import FrozenModel

HELP = """\
specdec doctor [HEAD] [target=DIR] [data=NAME] [prompts=N] [new_tokens=N] [tokens=K] [dtype=TYPE]
               [device=NAME] [seed=N] [json=FILE]

Loads an EAGLE head (a folder with config.json and safetensors; default: the bundled one) under
every reading that loaders disagree on: the numbers of the target's layers, the residual before or
after its norm, the output fed back before or after the norm, norms and biases left out, rotary
frequencies of the head or of the target. The target (default: the bundled one) continues some
prompts, sampled at temperature 0.6; at every new token outside loops each reading drafts K
likeliest tokens. A head that is read wrongly decodes the same text, only more slowly.

  accepted   mean number of a draft's tokens that the text has, of K; a pass gives one token more
  by place   share of right tokens at each place of a draft, where those before it were right
  loss       accepted tokens lost against the best reading

  data=         a data set of `specdec list` (stdlib)
  prompts=      prompts (8)
  new_tokens=   new tokens per prompt (96)
  tokens=       K (4)
  json=         file for the figures, "-" for the screen in place of the table

Exit status: 1 another reading than the folder's is better, by more than 2 % and by a standard
error over the texts, or none has accepted tokens; else 0.

Examples
  specdec doctor
  specdec doctor heads/eagle3-llama target=models/llama dtype=bfloat16 data=humaneval
"""

_CLOSE = 0.02  # share of the best reading's accepted tokens within which the folder's own is right
_LEAST = 0.05  # tokens accepted per draft; a head that is trained for the target has more than one
_ERRORS = 1.0  # standard errors over texts by which another reading must be better


@dataclass(frozen=True, kw_only=True)
class Keys:
    target: Text = "bundled:target"
    data: Text = "stdlib"
    dtype: Text = "float32"
    device: Text = "cpu"
    prompts: Count = 8
    new_tokens: Count = 96
    tokens: Count = 4
    seed: Index = 0
    json: Text | None = None


def main(arguments: Arguments) -> int:
    names, options = read_values(arguments.overrides, Keys, "one folder of a head", least=0)
    (name,) = names or ["bundled:eagle3"]
    # Imported here: torch and transformers take seconds to import.
    from specdec.metrics.loops import loop_share
    from specdec.models.bundled import family_path
    from specdec.models.eagle_loading import HeadFiles
    from specdec.models.eagle_readings import accepted, load_reading, readings
    from specdec.models.frozen import FrozenModel
    from specdec.models.loading import load_model

    files = HeadFiles(family_path(name))
    target = family_path(options.target)
    frozen = FrozenModel(load_model(target, dtype=options.dtype, device=options.device))
    known = readings(files, frozen)
    texts = _texts(frozen, target, options)
    counts = []
    for reading in known:
        head = load_reading(files, reading, frozen)
        counts.append(accepted(frozen, head, texts, options.tokens, normed=reading.normed))
    if not counts[0].drafts:
        raise UserError(
            f"the target's texts have no place for a draft of {options.tokens} tokens outside"
            " loops: give more prompts= or new_tokens="
        )
    report = {
        "head": name,
        "target": options.target,
        **{key: vars(options)[key] for key in ("data", "dtype", "seed", "prompts", "new_tokens")},
        "sampling": "0.6/0.9/80",
        "drafts": counts[0].drafts,
        "tokens": options.tokens,
        "loop_share": loop_share([text[prompt:].tolist() for text, prompt in texts]),
        **_compared(known, counts),
    }
    _show(report, options.json)
    return 0 if report["is_right"] else 1


def _texts(frozen: FrozenModel, target: str, options: Keys) -> list[tuple[Tensor, int]]:
    """Samples continuations of the target: (tokens int64[T + L], prompt length T) per prompt."""
    import torch

    from specdec.data import load_prompts
    from specdec.data.prompt import prompt_tokens
    from specdec.models.loading import load_tokenizer

    tokenizer = load_tokenizer(target)
    texts = []
    limit = config_value(frozen.config, "max_position_embeddings")
    with torch.random.fork_rng():
        torch.manual_seed(options.seed)
        for prompt in load_prompts(name=options.data, limit=options.prompts, tokenizer=tokenizer):
            ids = torch.from_numpy(prompt_tokens(prompt, tokenizer))
            if limit is not None:
                ids = ids[-max(2, limit - options.new_tokens) :]
            text = frozen.model.generate(
                ids[None].to(frozen.device),
                attention_mask=torch.ones_like(ids[None]).to(frozen.device),
                max_new_tokens=options.new_tokens,
                do_sample=True,
                temperature=0.6,
                top_p=0.9,
                top_k=80,
                pad_token_id=0,
            )[0].cpu()
            texts.append((text, len(ids)))
    return texts


def _compared(known: Sequence[Reading], counts: Sequence[Accepted]) -> dict[str, Any]:
    """Compares the readings; the first one is the folder's own."""
    best = max(range(len(known)), key=lambda i: counts[i].mean)
    top, own = counts[best].mean, counts[0].mean
    rows = [
        {
            "reading": reading.name,
            "read_by": reading.read_by,
            "remedy": reading.remedy,
            "accepted": count.mean,
            "by_place": count.by_position,
            "loss": 1.0 - count.mean / top if top else 0.0,
        }
        for reading, count in zip(known, counts, strict=True)
    ]
    gains = [b - a for a, b in zip(counts[0].by_text, counts[best].by_text, strict=True)]
    by_chance = sum(gains) <= _ERRORS * sum(gain * gain for gain in gains) ** 0.5
    right = own >= (1.0 - _CLOSE) * top or by_chance
    return {
        "readings": rows,
        "best": known[0 if right else best].name,
        "fits": top >= _LEAST,
        "is_right": right and top >= _LEAST,
    }


def _show(report: dict[str, Any], json_file: str | None) -> None:
    from specdec.files import plain, write_json

    if json_file == "-":
        print(json.dumps(plain(report), indent=1))
        return
    if json_file:
        write_json(Path(json_file), report)
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=(0, 1), show_edge=False)
    table.add_column("reading", no_wrap=True)
    for name in ("accepted", "by place", "loss"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("read so by", no_wrap=True)
    for row in report["readings"]:
        places = " ".join(f"{share:.2f}" for share in row["by_place"])
        loss = f"{100 * row['loss']:.1f} %"
        table.add_row(row["reading"], f"{row['accepted']:.3f}", places, loss, row["read_by"])
    console = Console(highlight=False, soft_wrap=True, width=110)
    console.print(
        f"{report['head']} for {report['target']}: {report['drafts']} drafts of {report['tokens']}"
        f" tokens, data={report['data']}, loop_share {report['loop_share']:.2f} (left out)",
        markup=False,
    )
    console.print(table)
    for line in _verdict(report):
        console.print(line, markup=False)


def _verdict(report: dict[str, Any]) -> list[str]:
    own, *others = report["readings"]
    if not report["fits"]:
        return [
            "The target accepts next to nothing under any reading: the head was trained for another"
            " target, or not at all."
        ]
    if report["is_right"]:
        worst = max(others, key=lambda row: row["loss"], default=None)
        summary = "The folder is read as the head was trained: no other accepts clearly more."
        if worst is None or worst["loss"] <= 0:
            return [summary]
        lost = f"{100 * worst['loss']:.0f} %"
        return [summary, f"Read with {worst['reading']!r} it would lose {lost} of accepted tokens."]
    best = next(row for row in report["readings"] if row["reading"] == report["best"])
    lost = f"{100 * own['loss']:.0f} %"
    summary = (
        f"The head was trained for {best['reading']!r}: as on disk it loses {lost} of its tokens."
    )
    if best["remedy"]:
        return [summary, f"Put into its config.json: {best['remedy']}"]
    return [summary]
