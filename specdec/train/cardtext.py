"""Text of the model card, from measurements alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.data.stdlib import HELD_OUT_MODULUS
from specdec.train.corpus import EVALUATED

RANKS = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class Heads:
    """What is known of the heads that read the target's hidden states.

    Attributes:
        parameters: name -> weights in the file.
        measured: rows of measured-*.json.
        records: training-*.json of the runs.
    """

    parameters: Mapping[str, int]
    measured: Sequence[Mapping[str, Any]]
    records: Sequence[Mapping[str, Any]]


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def _losses(measured: dict[str, Any], records: dict[str, Any]) -> str:
    rows = []
    for part in ("target", "draft"):
        loss, record = measured[part], records[part]
        rows.append(
            [
                part,
                f"{record.get('parameters', 0) / 1e6:.2f} M",
                f"{loss['per_token']:.3f}",
                f"{loss['per_byte']:.4f}",
                f"{record.get('tokens', 0) / 1e6:.1f} M",
                f"{record.get('minutes', 0):.0f}",
                f"{loss['pass_ms']:.2f}",
            ]
        )
    head = ["model", "parameters", "nats/token", "nats/byte", "tokens seen", "minutes", "pass, ms"]
    target, draft = measured["target"], measured["draft"]
    ratio = target["pass_ms"] / draft["pass_ms"]
    return "\n".join(
        [
            table(head, rows),
            "",
            f"Losses: all {target['tokens']} tokens ({target['bytes']} bytes) of the held-out "
            f"files, windows of {measured['loss_window']} positions. A pass is one transformers "
            "forward of one token after 128 cached ones (float32, CPU, median); target over "
            f"draft: {ratio:.1f}. Tokens and minutes of the draft are those "
            f"of distillation.{_reference(measured)}",
        ]
    )


def _reference(measured: dict[str, Any]) -> str:
    if "reference" not in measured:
        return ""
    other = measured["reference"]
    less = 1.0 - measured["target"]["per_byte"] / other["per_byte"]
    return (
        f" For comparison, a quickly trained model of {other['parameters'] / 1e6:.1f} M parameters "
        f"and {other['layers']} layers has {other['per_byte']:.4f} nats per byte on these files; "
        f"the target is {less:.0%} below it."
    )


def _agreement(measured: dict[str, Any]) -> str:
    if not measured["agreement"]:
        return "Not measured: none of the data sets was found."
    head = ["data", "sampling", "tokens", "loop_share", "where", *[f"top-{k}" for k in RANKS]]
    rows = []
    for found in measured["agreement"]:
        first = [
            f"{found['data']} ({found['prompts']} prompts)",
            found["sampling"],
            str(found["tokens"]),
            f"{found['loop_share']:.3f}",
        ]
        for where in ("outside", "inside"):
            rows.append([*first, f"{where} loops", *[f"{rate:.3f}" for rate in found[where]]])
            first = [""] * len(first)
    note = (
        f"Continuations by the target, at most {measured['new_tokens']} tokens each, ended at the "
        "end token. top-k: share of those tokens among the draft's k likeliest. A token is inside "
        "a loop when it ends an 8-gram already generated; loop_share is the share of such tokens. "
        f"Prompts go in batches of {measured['batch']} of nearly equal length; the longer ones of "
        "a batch lose their first tokens."
    )
    return table(head, rows) + "\n\n" + note


def _curve(record: dict[str, Any]) -> str:
    rows = [
        [
            f"{row['step']:.0f}",
            f"{row['tokens'] / 1e6:.2f}",
            f"{row['minutes']:.1f}",
            f"{row['layers']:.0f}",
            f"{row['loss']:.3f}",
            f"{row['held_out']:.3f}" if "held_out" in row else "",
        ]
        for row in record.get("curve", [])
    ]
    window = record.get("held_out_window", 256)
    head = ["step", "million tokens", "minutes", "layers", "loss", f"held-out, windows of {window}"]
    return table(head, rows) if rows else "No record of the run is present."


def _finish(record: dict[str, Any]) -> list[str]:
    if "finish" not in record:
        return []
    finish = record["finish"]
    rounds, blend = finish["rounds"], finish["blend"]
    windows = dict.fromkeys(str(size) for one in rounds for size in one.get("windows", ()))
    told = finish.get("note") or f"Text came in windows of {', '.join(windows)} positions."
    rows = [
        [str(number), f"{one['repeated_share']:.3f}", str(one["steps"]), f"{one['minutes']:.1f}"]
        for number, one in enumerate(rounds, start=1)
    ]
    return [
        "\n## Loops trained away\n",
        "In each round the target's own samples, part of them greedy, were searched for repeated "
        "8-grams, and training on text went on with those tokens made unlikely. The shipped "
        f"weights lie {blend:.0%} of the way from those before the first round to those after the "
        f"last. {told}\n",
        table(["round", "share of sampled tokens in a repetition", "steps", "minutes"], rows),
    ]


def _heads(heads: Heads) -> list[str]:
    """Parameters and agreement of each head; nothing where there are none."""
    if not heads.parameters:
        return []
    found = {(row["head"], row["data"]): row for row in heads.measured if "." in row["sampling"]}
    data = list(dict.fromkeys(name for _, name in found))
    rows = []
    for name, parameters in heads.parameters.items():
        cells = [found.get((name, one)) for one in data]
        rates = [f"{cell['outside'][0]:.3f}" if cell else "" for cell in cells]
        rows.append([name, f"{parameters / 1e6:.2f} M", *rates])
    sampling = next((row["sampling"] for row in heads.measured if "." in row["sampling"]), "")
    lines = [
        f"- {', '.join(one['heads'])}: {one['steps']} steps, {one['tokens'] / 1e6:.2f} M tokens,"
        f" {one['minutes']:.0f} minutes on {one['machine']}."
        for one in heads.records
        if "heads" in one
    ]
    return [
        "\n## Heads on the target's hidden states\n",
        "Named by kind and by the target's layers before them (medusa: and by how many positions "
        f"further on they predict). Top-1 agreement outside loops, sampling {sampling}, on the "
        "target's own continuations:\n",
        table(["head", "parameters", *data], rows),
        "",
        *lines,
    ]


def _data(corpus: dict[str, Any]) -> str:
    if not corpus:
        return "No record of the corpus is present."
    rows = [
        [
            name,
            str(row["licence"]),
            str(row["files"]),
            f"{row['bytes'] / 1e6:.2f}",
            f"{row['functions'] / 1e6:.2f}",
        ]
        for name, row in corpus["sources"].items()
    ]
    streams = [
        [name, f"{row['tokens'] / 1e6:.2f}", f"{row['bytes'] / 1e6:.2f}"]
        for name, row in corpus["streams"].items()
    ]
    dropped = ", ".join(f"{reason} {count}" for reason, count in corpus["dropped"].items())
    head = ["source", "licence as its metadata states", "documents", "MB", "MB as functions"]
    return "\n".join(
        [
            table(head, rows),
            "",
            table(["stream", "million tokens", "MB"], streams),
            "",
            f"Files dropped: {dropped}.",
            "",
            f"Held out (CRC-32 of the path is a multiple of {HELD_OUT_MODULUS}), Python "
            f"{corpus['python']}: " + ", ".join(corpus["held_out_files"]) + ".",
        ]
    )


INTRODUCTION = """# The tiny family

A target of 24 layers, finished by training its own loops away, a draft of 2 layers distilled from
it, and token sequences sampled from the draft from which n-gram models are counted. All share one
byte-level BPE tokenizer of 4096 entries; `<|end|>`, id 0, begins, ends and pads. They exist so that
speculative decoding can be tried and tested where there is no network: they continue Python text
plausibly for a few lines and are of no use as programmers or as calculators.

This page is written by `specdec train card`; every figure on it is measured by that command or
recorded by the run it describes. Rebuild in this order: `specdec train tokenizer`,
`specdec train target`, `specdec train finish`, `specdec train draft`, `specdec train ngram`,
`specdec train bundled_heads`, `specdec train medusa_heads`, `specdec train card`; with an
`output_dir` and a `work_dir` of your own, since a tokenizer is never learnt anew beside models that
use another.
"""

LIMITS = """## Limits

- Trained in a few hours on two CPU cores: every loss here is far above what the size allows.
- Greedy decoding loops. Loops are easy to draft, so read acceptance figures with `loop_share`
  beside them, and prefer sampled settings for comparisons.
- A line break and the indentation after it are one token, so a prompt should not end in a line
  break: it would say that no indentation follows. Strip it.
- Text: Python code and a little GSM8K-style English arithmetic. Other text is outside its domain.
- {kept_out}, and held-out files were never read for training or for
  the tokenizer. A near copy of a held-out file in another package was dropped as well (half of
  its 3-line shingles seen before); shorter shared passages may remain.
"""


def _kept_out(corpus: dict[str, Any]) -> str:
    names = corpus.get("kept_out", list(EVALUATED))  # records of before say nothing: it was both
    if not names:
        return "No evaluation set was at hand when the text was gathered, so none was kept out"
    sets = " or\n  with ".join(names)
    return (
        f"No evaluation prompt was trained on: a file that shares 13 consecutive words with {sets}"
        " was dropped"
    )


def write_card(
    folder: Path,
    measured: dict[str, Any],
    records: dict[str, Any],
    corpus: dict[str, Any],
    heads: Heads,
) -> None:
    """Writes folder/README.md.

    Args:
        folder: of the family.
        measured: what card.make_card measured.
        records: training.json of "target" and "draft", {} where absent.
        corpus: corpus.json, {} where absent.
        heads: of the target.
    """
    draft = records["draft"]
    distilled = (
        f"The draft begins as the target's layers {draft['target_layers']} with its embedding. "
        f"The target's own samples among the text it is distilled on hold "
        f"{draft['sampled_tokens'] / 1e6:.2f} M tokens, prompts included. {draft.get('note', '')}"
        if "target_layers" in draft
        else ""
    )
    machine = records["target"].get("machine", "not recorded")
    note = records["target"].get("note", "")
    parts = [
        INTRODUCTION,
        f"## Figures\n\nMachine: {machine}. {note}\n",
        _losses(measured, records),
        "\n## Draft's agreement with the target\n",
        _agreement(measured),
        *_heads(heads),
        "\n## Data\n",
        _data(corpus),
        "\n## Loss of the target while training\n",
        _curve(records["target"]),
        *_finish(records["target"]),
        "\n## Distillation of the draft\n",
        f"{distilled} The loss is the divergence KL(target || draft) in nats; held-out is the "
        "cross entropy on the held-out text.\n",
        _curve(draft),
        "\n" + LIMITS.replace("{kept_out}", _kept_out(corpus)),
    ]
    (folder / "README.md").write_text("\n".join(parts), encoding="ascii", errors="replace")
