"""``specdec doctor`` finds which reading of an EAGLE head's files its target accepts best."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.cli.arguments import read_arguments
from specdec.config.hydra import parse
from specdec.errors import UserError
from specdec.parts.fields import Count, Index, Text, did_you_mean, errors_of

if TYPE_CHECKING:
    from torch import Tensor

    from specdec.models.eagle_readings import Accepted, Reading
    from specdec.models.frozen import FrozenModel

HELP = """\
specdec doctor [HEAD] [target=DIR] [key=value] ...

Loads an EAGLE head (a folder with config.json and safetensors; default: the bundled one) under
every reading that loaders disagree on: the numbers of the target's layers, the residual before or
after its norm, the output fed back before or after the norm, norms and biases left out, rotary
frequencies of the head or of the target. The target (default: the bundled one) continues some
prompts, sampled at temperature 0.6; at every new token outside loops each reading drafts K
likeliest tokens. A head that is read wrongly decodes the same text, only more slowly.

  accepted   mean number of a draft's tokens that the text has, of K; a pass gives one token more
  by place   share of right tokens at each place of a draft, where those before it were right
  loss       accepted tokens lost against the best reading

  target=DIR data=stdlib dtype=float32 device=cpu seed=0
  prompts=8 new_tokens=96   prompts of the data set, and new tokens of each
  tokens=4                  K
  json=FILE                 file for the figures, "-" for the screen in place of the table

Exit status: 1 another reading than the folder's is better, by more than 2 % and by a standard
error over the texts, or none has accepted tokens; else 0.

Examples
  specdec doctor
  specdec doctor heads/eagle3-llama target=models/llama dtype=bfloat16 data=humaneval
"""

_CLOSE = 0.02  # share of the best reading's accepted tokens within which the folder's own is right
_LEAST = 0.05  # tokens accepted per draft; a head that is trained for the target has more than one


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    head: Text = "bundled:eagle3"
    target: Text = "bundled:target"
    data: Text = "stdlib"
    dtype: Text = "float32"
    device: Text = "cpu"
    seed: Index = 0
    prompts: Count = 8
    new_tokens: Count = 96
    tokens: Count = 4
    json: Text | None = None


def _read(words: Sequence[str]) -> _Options:
    given: dict[str, Any] = {}
    known = {field.name for field in fields(_Options)}
    for word in read_arguments(words, flags=()).overrides:
        key, equals, _ = word.partition("=")
        if not equals and "head" in given:
            raise UserError(f"specdec doctor takes one head: leave {word} out")
        if equals and key not in known:
            raise UserError(
                f"{word}: {key} is no key of `specdec doctor`: {did_you_mean(key, known)}"
            )
        given[key if equals else "head"] = parse([word])[0].value() if equals else word
    for error in errors_of(_Options, given):
        raise UserError(error)
    return _Options(**given)


def main(words: Sequence[str]) -> int:
    options = _read(words)
    # Imported here: torch and transformers take seconds to import.
    from specdec.files import plain, write_json
    from specdec.metrics.loops import loop_share
    from specdec.models.bundled import family_path
    from specdec.models.eagle_loading import HeadFiles
    from specdec.models.eagle_readings import accepted, load_reading, readings
    from specdec.models.frozen import FrozenModel
    from specdec.models.loading import load_model

    files, target = HeadFiles(family_path(options.head)), family_path(options.target)
    frozen = FrozenModel(load_model(target, dtype=options.dtype, device=options.device))
    known, texts = readings(files, frozen), _texts(frozen, target, options)
    counts = [
        accepted(frozen, load_reading(files, one, frozen), texts, options.tokens, normed=one.normed)
        for one in known
    ]
    if not counts[0].drafts:
        raise UserError(
            f"the target's texts have no place for a draft of {options.tokens} tokens outside"
            " loops: give more prompts= or new_tokens="
        )
    settings = {
        key: value for key, value in asdict(options).items() if key not in ("json", "device")
    }
    report = {
        **{**settings, "sampling": "0.6/0.9/80", "drafts": counts[0].drafts},
        "loop_share": loop_share([text[prompt:].tolist() for text, prompt in texts]),
        **_compared(known, counts),
    }
    if options.json == "-":
        print(json.dumps(plain(report), indent=1))
        return 0 if report["is_right"] else 1
    if options.json:
        write_json(Path(options.json), report)
    _show(report)
    return 0 if report["is_right"] else 1


def _texts(frozen: FrozenModel, target: str, options: _Options) -> list[tuple[Tensor, int]]:
    """Samples continuations of the target: (tokens int64[T + L], prompt length T) per prompt."""
    import torch

    from specdec.data import load_prompts
    from specdec.data.prompt import prompt_tokens
    from specdec.models.config_values import config_value
    from specdec.models.loading import load_tokenizer

    tokenizer, texts = load_tokenizer(target), []
    limit = config_value(frozen.config, "max_position_embeddings")
    sampling = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 80, "pad_token_id": 0}
    with torch.random.fork_rng():
        torch.manual_seed(options.seed)
        for prompt in load_prompts(name=options.data, limit=options.prompts, tokenizer=tokenizer):
            ids = torch.from_numpy(prompt_tokens(prompt, tokenizer))
            if limit is not None:
                ids = ids[-max(2, limit - options.new_tokens) :]
            given = ids[None].to(frozen.device)
            shape = {"attention_mask": torch.ones_like(given), "max_new_tokens": options.new_tokens}
            text = frozen.model.generate(given, **shape, **sampling)[0].cpu()
            texts.append((text, len(ids)))
    return texts


def _compared(known: Sequence[Reading], counts: Sequence[Accepted]) -> dict[str, Any]:
    """Compares the readings; the first one is the folder's own."""
    best = max(range(len(known)), key=lambda i: counts[i].mean)
    top, own = counts[best].mean, counts[0].mean
    rows = [
        {
            **{"reading": reading.name, "read_by": reading.read_by, "remedy": reading.remedy},
            **{"accepted": count.mean, "by_place": count.by_position},
            "loss": 1.0 - count.mean / top if top else 0.0,
        }
        for reading, count in zip(known, counts, strict=True)
    ]
    gains = [b - a for a, b in zip(counts[0].by_text, counts[best].by_text, strict=True)]
    by_chance = sum(gains) <= sum(gain * gain for gain in gains) ** 0.5  # one standard error
    right, fits = own >= (1.0 - _CLOSE) * top or by_chance, top >= _LEAST
    name = known[0 if right else best].name
    return {"readings": rows, "best": name, "fits": fits, "is_right": right and fits}


def _show(report: dict[str, Any]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=(0, 1), show_edge=False)
    for name in ("reading", "accepted", "by place", "loss", "read so by"):
        table.add_column(name, justify="left" if "read" in name else "right", no_wrap=True)
    for row in report["readings"]:
        places = " ".join(f"{share:.2f}" for share in row["by_place"])
        figures = f"{row['accepted']:.3f}", places, f"{100 * row['loss']:.1f} %"
        table.add_row(row["reading"], *figures, row["read_by"])
    text = "{head} for {target}: {drafts} drafts of {tokens} tokens, data={data}, loop_share"
    console = Console(highlight=False, soft_wrap=True, width=110, markup=False)
    console.print(f"{text} {{loop_share:.2f}} (left out)".format(**report))
    console.print(table)
    own, *others = report["readings"]
    if not report["fits"]:
        console.print(
            "The target accepts next to nothing under any reading: the head was trained for another"
            " target, or not at all."
        )
    elif report["is_right"]:
        console.print("The folder is read as the head was trained: no other accepts clearly more.")
        worst = max(others, key=lambda row: row["loss"], default=own)
        if worst["loss"] > 0:
            lost = f"{100 * worst['loss']:.0f} % of accepted tokens"
            console.print(f"Read with {worst['reading']!r} it would lose {lost}.")
    else:
        best = next(row for row in others if row["reading"] == report["best"])
        lost = f"{100 * own['loss']:.0f} % of its tokens"
        console.print(f"The head was trained for {best['reading']!r}: as on disk it loses {lost}.")
        if best["remedy"]:
            console.print(f"Put into its config.json: {best['remedy']}")
