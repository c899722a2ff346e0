"""The target's own answers to the training prompts, as one small file in the repository.

    python -m experiments.smollm2.answers split PROMPTS FOLDER            one file per sampling
    specdec run strategy=ar model=hf model.target=SMOLLM2 data=jsonl \\
        data.path=FOLDER/greedy.jsonl data.field=text data.limit=null batch_size=48 \\
        max_new_tokens=256 output_dir=RUNS/greedy
    (the same with FOLDER/t06.jsonl and sampling=t06)
    python -m experiments.smollm2.answers collect PROMPTS RUNS experiments/smollm2/answers.jsonl.gz
    python -m experiments.smollm2.answers texts experiments/smollm2/answers.jsonl.gz PROMPTS FILE

`specdec run` continues an interrupted run, so generation may stop at any time. Half of the prompts
are answered greedily, half at temperature 0.6 (top-p 0.9, top-k 80). ``collect`` keeps what the
project may keep: answers, and the prompts that the target wrote itself; of other prompts it keeps
their source and sha256. ``texts`` puts prompts and answers together again, as a trainer reads
them, one ``{"prompt", "answer", "sampling", "kind", "ended"}`` per line, and fails where a prompt
has changed.

An answer that loops is cut where its first repetition of 12 consecutive words is complete: loops
are easy to draft, and a drafter trained on them looks better than it is.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specdec.data.files import read_records

SAMPLINGS = ("greedy", "t06")
LOOP_WORDS = 12


def sampling_of(number: int, kinds: int = 3) -> str:
    """Sampling of the prompt in line ``number``; alternates within each interleaved kind."""
    return SAMPLINGS[(number // kinds) % 2]


def without_loop(text: str) -> str:
    """The text up to the first word that completes a repeated 12-gram, or all of it."""
    pieces = text.split(" ")
    seen = set()
    for end in range(LOOP_WORDS, len(pieces) + 1):
        gram = tuple(pieces[end - LOOP_WORDS : end])
        if gram in seen:
            return " ".join(pieces[: end - 1])
        seen.add(gram)
    return text


def prompts_of(path: Path) -> list[dict[str, Any]]:
    return [record for _, record in read_records(path)]


def split(prompts: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = prompts_of(prompts)
    for sampling in SAMPLINGS:
        texts = [r["text"] for i, r in enumerate(rows) if sampling_of(i) == sampling]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"{sampling}.jsonl").write_text(lines, encoding="utf-8")
        print(f"{sampling}: {len(texts)} prompts")


def answered(rows: list[dict[str, Any]], runs: Path) -> Iterator[dict[str, Any]]:
    """Every prompt that has an answer, with it, in the order of the prompts."""
    found: dict[int, tuple[str, dict[str, Any]]] = {}
    for sampling in SAMPLINGS:
        numbers = [i for i in range(len(rows)) if sampling_of(i) == sampling]
        path = runs / sampling / "requests.jsonl"
        for _, record in read_records(path) if path.exists() else ():
            found[numbers[record["id"]]] = sampling, record
    for number in sorted(found):
        sampling, record = found[number]
        text = record["text"].removesuffix("<|im_end|>")
        cut = without_loop(text)
        row = {key: rows[number][key] for key in ("kind", "source", "sha256")}
        if row["kind"] == "chat":
            row["prompt"] = rows[number]["text"]
        ended = record["finish_reason"] == "eos" and cut == text
        yield {**row, "sampling": sampling, "ended": ended, "answer": cut}


def collect(prompts: Path, runs: Path, file: Path) -> None:
    count: Counter[str] = Counter()
    with gzip.GzipFile(file, "wb", mtime=0) as out:
        for row in answered(prompts_of(prompts), runs):
            count.update({row["kind"]: 1, row["sampling"]: 1, "not ended": not row["ended"]})
            count["characters"] += len(row["answer"])
            out.write(json.dumps(row).encode() + b"\n")
    print(dict(count), f"{file.stat().st_size:,} bytes")


def texts(answers: Path, prompts: Path, file: Path) -> None:
    by_source = {(r["kind"], r["source"]): r for r in prompts_of(prompts)}
    lines = []
    for _, row in read_records(answers):
        prompt = row.get("prompt")
        if prompt is None:
            made = by_source.get((row["kind"], row["source"]))
            if made is None or made["sha256"] != row["sha256"]:
                sys.exit(f"{row['source']}: not among the prompts, or changed; install its version")
            prompt = made["text"]
        kept = {key: row[key] for key in ("answer", "sampling", "kind", "ended")}
        lines.append(json.dumps({"prompt": prompt, **kept}) + "\n")
    file.write_text("".join(lines), encoding="utf-8")
    print(f"{len(lines)} answers in {file}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = {
        "split": (split, ("prompts", "folder")),
        "collect": (collect, ("prompts", "runs", "file")),
        "texts": (texts, ("answers", "prompts", "file")),
    }
    parsers = parser.add_subparsers(dest="command", required=True)
    for name, (_, arguments) in commands.items():
        command = parsers.add_parser(name)
        for argument in arguments:
            command.add_argument(argument, type=Path)
    options = vars(parser.parse_args())
    commands[options.pop("command")][0](**options)


if __name__ == "__main__":
    main()
