from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from specdec.cli.arguments import Arguments, OneModel, help_of, read_values
from specdec.cli.execute import reporting
from specdec.errors import UserError
from specdec.parts.fields import Count, Index, Text

if TYPE_CHECKING:
    from torch import Tensor

    from specdec.models.eagle_readings import Reading
    from specdec.models.frozen import FrozenModel
    from specdec.runs.progress import Progress


@dataclass(frozen=True, kw_only=True)
class Keys(OneModel):
    target: Annotated[Text, "folder of the target"] = "bundled:target"
    data: Annotated[Text, "data set of the prompts"] = "stdlib"
    seed: Annotated[Index, "of the sampled continuations"] = 0
    prompts: Annotated[Count, "of the data set"] = 8
    new_tokens: Annotated[Count, "continuing each prompt"] = 96
    tokens: Annotated[Count, "K"] = 4
    json: Annotated[Text | None, 'file for the figures; "-": printed in place of a table'] = None


HELP = f"""\
specdec doctor [HEAD] [target=DIR] [key=value] ...

Loads an EAGLE head (a folder with config.json and safetensors; default: the bundled one) under
every reading that loaders disagree on: the numbers of the target's layers, the residual before or
after its norm, the output fed back before or after the norm, norms and biases left out, rotary
frequencies of the head or of the target. The target continues some prompts, sampled at temperature
0.6; at every new token outside loops each reading drafts K likeliest tokens. A head that is read
wrongly decodes the same text, only more slowly.

  accepted   mean number of a draft's tokens that the text has, of K; a pass gives one token more
  by place   share of right tokens at each place of a draft, where those before it were right
  loss       accepted tokens lost against the best reading

{help_of(Keys)}

Exit status: 1 another reading than the folder's is better, by more than 2 % and by a standard
error over the texts, or none has accepted tokens; else 0.

Examples
  specdec doctor
  specdec doctor heads/eagle3-llama target=models/llama dtype=bfloat16 data=humaneval
"""

_CLOSE = 0.02  # share of the best reading's accepted tokens within which the folder's own is right
_LEAST = 0.05  # tokens accepted per draft; a head that is trained for the target has more than one


def main(arguments: Arguments) -> int:
    names, options = read_values(arguments.overrides, Keys, "one folder of a head", least=0)
    (name,) = names or ["bundled:eagle3"]
    from specdec.files import plain, write_json
    from specdec.metrics.loops import loop_share
    from specdec.models.bundled import family_path
    from specdec.models.eagle_loading import HeadFiles
    from specdec.models.eagle_readings import accepted, load_reading, readings
    from specdec.models.frozen import FrozenModel
    from specdec.models.loading import load_model

    files, target = HeadFiles(family_path(name, "HEAD")), family_path(options.target, "target")
    counts = []
    with reporting() as progress:
        progress.phase("loading the target")
        frozen = FrozenModel(load_model(target, dtype=options.dtype, device=options.device))
        known, texts = readings(files, frozen), _texts(frozen, target, options, progress)
        progress.phase("trying readings", len(known))
        for one in known:
            head = load_reading(files, one, frozen)
            counts.append(accepted(frozen, head, texts, options.tokens, normed=one.normed))
            progress.advance(detail=one.name)
    if not (drafts := sum(map(len, counts[0]))):
        raise UserError(
            f"the target's texts have no place for a draft of {options.tokens} tokens outside"
            " loops: give more prompts= or new_tokens="
        )
    report = {
        **{"head": name, **asdict(options), "sampling": "0.6/0.9/80", "drafts": drafts},
        "loop_share": loop_share([text[prompt:].tolist() for text, prompt in texts]),
        **_compared(known, counts, options.tokens),
    }
    del report["json"], report["device"]
    if options.json not in (None, "-"):
        write_json(Path(str(options.json)), report)
    if options.json == "-":
        print(json.dumps(plain(report), indent=1))
    else:
        _show(report)
    return 0 if report["is_right"] else 1


def _texts(
    frozen: FrozenModel, target: str, options: Keys, progress: Progress
) -> list[tuple[Tensor, int]]:
    """Samples continuations of the target: (tokens int64[T + L], prompt length T) per prompt."""
    import torch

    from specdec.data import load_prompts
    from specdec.data.prompt import fit_prompt, prompt_tokens
    from specdec.models.config_values import config_value
    from specdec.models.loading import load_tokenizer

    tokenizer, texts = load_tokenizer(target), []
    limit = config_value(frozen.config, "max_position_embeddings")
    sampling = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 80, "pad_token_id": 0}
    with torch.random.fork_rng():
        torch.manual_seed(options.seed)
        prompts = load_prompts(name=options.data, limit=options.prompts)
        progress.phase("continuing prompts", len(prompts))
        for prompt in prompts:
            tokens = prompt_tokens(prompt, tokenizer)
            room = len(tokens) if limit is None else max(2, limit - options.new_tokens)
            ids = torch.from_numpy(fit_prompt(tokens, max_len=room, label=prompt.name)[0])
            given = ids[None].to(frozen.device)
            shape = {"attention_mask": torch.ones_like(given), "max_new_tokens": options.new_tokens}
            text = frozen.model.generate(given, **shape, **sampling)[0].cpu()
            texts.append((text, len(ids)))
            progress.advance()
    return texts


def _compared(
    known: Sequence[Reading], counts: Sequence[Sequence[Tensor]], num_tokens: int
) -> dict[str, Any]:
    import numpy as np

    rows: list[dict[str, Any]] = []
    sums = np.array([[int(runs.sum()) for runs in by_text] for by_text in counts])
    for reading, by_text in zip(known, counts, strict=True):
        runs = np.concatenate([runs.numpy() for runs in by_text])
        reached = (runs[:, None] >= np.arange(num_tokens + 1)).sum(0)
        places = (reached[1:] / np.maximum(1, reached[:-1])).tolist()
        about = {"reading": reading.name, "read_by": reading.read_by, "remedy": reading.remedy}
        rows.append({**about, "accepted": float(runs.mean()), "by_place": places})
    top = max(row["accepted"] for row in rows)
    for row in rows:
        row["loss"] = 1.0 - row["accepted"] / top if top else 0.0
    best = min(range(len(rows)), key=lambda i: rows[i]["loss"])
    gains = sums[best] - sums[0]
    by_chance = bool(gains.sum() <= np.linalg.norm(gains))  # one standard error
    right, fits = rows[0]["loss"] <= _CLOSE or by_chance, top >= _LEAST
    name = known[0 if right else best].name
    return {"readings": rows, "best": name, "fits": fits, "is_right": right and fits}


def _show(report: dict[str, Any]) -> None:
    import pandas as pd

    table = pd.DataFrame(report["readings"]).rename(columns={"read_by": "read so by"})
    table["by place"] = [" ".join(f"{share:.2f}" for share in of) for of in table["by_place"]]
    text = "{head} for {target}: {drafts} drafts of {tokens} tokens, data={data}, loop_share"
    print(f"{text} {{loop_share:.2f}} (left out)".format(**report))
    shown = table[["reading", "accepted", "by place", "loss", "read so by"]]
    forms = {"accepted": "{:.3f}".format, "loss": lambda loss: f"{100 * loss:.1f} %"}
    print(shown.to_string(index=False, formatters=forms))
    own, *_ = readings = report["readings"]
    if not report["fits"]:
        print(
            "The target accepts next to nothing under any reading: the head was trained for another"
            " target, or not at all."
        )
    elif report["is_right"]:
        print("The folder is read as the head was trained: no other accepts clearly more.")
        worst = max(readings, key=lambda row: row["loss"])
        if worst is not own:
            lost = f"{100 * worst['loss']:.0f} % of accepted tokens"
            print(f"Read with {worst['reading']!r} it would lose {lost}.")
    else:
        lost = f"{100 * own['loss']:.0f} % of its tokens"
        best = next(row for row in readings if row["reading"] == report["best"])
        print(f"The head was trained for {best['reading']!r}: as on disk it loses {lost}.")
        if best["remedy"]:
            print(f"Put into its config.json: {best['remedy']}")
