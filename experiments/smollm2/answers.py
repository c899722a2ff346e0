"""The target's own answers to the training prompts, as one small file in the repository.

    python -m experiments.smollm2.writer answers ANSWERS.jsonl --prompts PROMPTS.jsonl
    python -m experiments.smollm2.answers collect PROMPTS.jsonl ANSWERS.jsonl \\
        experiments/smollm2/answers.jsonl.gz
    python -m experiments.smollm2.answers texts experiments/smollm2/answers.jsonl.gz \\
        PROMPTS.jsonl FILE
    specdec train eagle3 model=smollm2 answers=FILE output_dir=DIR

Half of the prompts are answered greedily, half at temperature 0.6 (top-p 0.9). ``collect`` keeps
what the project may keep: answers, and the prompts that the target wrote itself; of other prompts
it keeps their source and sha256. ``texts`` puts prompts and answers together again as chats, which
a trainer reads, and fails where a prompt has changed.

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


def answered(rows: list[dict[str, Any]], answers: Path) -> Iterator[dict[str, Any]]:
    """Yields every prompt that has an answer, with it, in the order of the prompts."""
    found = {record["id"]: record for record in prompts_of(answers)}
    for number in sorted(found):
        text = found[number]["text"]
        cut = without_loop(text)
        row = {key: rows[number][key] for key in ("kind", "source", "sha256")}
        if row["kind"] == "chat":
            row["prompt"] = rows[number]["text"]
        ended = found[number]["finish_reason"] == "eos" and cut == text
        yield {**row, "sampling": sampling_of(number), "ended": ended, "answer": cut}


def collect(prompts: Path, answers: Path, file: Path) -> None:
    count: Counter[str] = Counter()
    with gzip.GzipFile(file, "wb", mtime=0) as out:
        for row in answered(prompts_of(prompts), answers):
            count.update({row["kind"]: 1, row["sampling"]: 1, "not ended": not row["ended"]})
            count["characters"] += len(row["answer"])
            out.write(json.dumps(row).encode() + b"\n")
    print(dict(count), f"{file.stat().st_size:,} bytes")


def texts(answers: Path, prompts: Path, file: Path) -> None:
    by_digest = {r["sha256"]: r["text"] for r in prompts_of(prompts)}  # sources may share a name
    lines = []
    for _, row in read_records(answers):
        prompt = row.get("prompt")
        if prompt is None:
            prompt = by_digest.get(row["sha256"])
            if prompt is None:
                sys.exit(f"{row['source']}: not among the prompts, or changed; install its version")
        answer = row["answer"] + ("<|im_end|>" if row["ended"] else "")
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": turns}) + "\n")
    file.write_text("".join(lines), encoding="utf-8")
    print(f"{len(lines)} answers in {file}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = {
        "collect": (collect, ("prompts", "answers", "file")),
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
