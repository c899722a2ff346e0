"""Training prompts for drafters of SmolLM2-135M-Instruct.

    python -m experiments.smollm2.prompts turns FILE [--number 2400]
    python -m experiments.smollm2.prompts build FILE --turns RUN_FOLDER [--each 2200]

The first command writes prompts that end where a user turn begins, so that `specdec run` lets the
target write user messages itself; the second makes training prompts of three kinds:

chat  these messages of the target
math  questions of GSM8K's training part (``SPECDEC_DATA``)
code  imports, signature and docstring of functions of installed packages, never of the standard
      library, which ``data=stdlib`` decodes

Prompts that share 13 consecutive words with a prompt of any evaluation set are dropped. Each line
of FILE has ``kind``, ``source`` (where the text is from), ``sha256`` of the text, and ``text``.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import random
import re
import sys
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from pathlib import Path

from specdec.data.files import read_records
from specdec.data.prompts import load_prompts
from specdec.data.sets import SETS, holds
from specdec.data.stdlib import heads_of, python_files, read_source

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
USER_TURN = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"
CODE = "Complete this Python function. Answer with the code alone.\n\n{}"  # as data=humaneval
PACKAGES = (
    *("accelerate", "einops", "huggingface_hub", "hydra", "jinja2", "matplotlib", "numpy"),
    *("omegaconf", "pandas", "rich", "scipy", "torch", "transformers"),
)
NGRAM = 13
MAX_CODE_CHARS = 1600
SEED = 2026

Entry = dict[str, str]


def ngrams(text: str) -> set[int]:
    """Hashes of the 13-grams of words; a shorter text has none."""
    words = re.findall(r"[a-z0-9]+", text.lower())
    return {hash(tuple(words[i : i + NGRAM])) for i in range(len(words) - NGRAM + 1)}


def evaluation_ngrams() -> set[int]:
    """13-grams of all prompts, all turns, of all evaluation sets in ``SPECDEC_DATA``."""
    found: set[int] = set()
    for name in SETS:
        if not holds(name):
            print(f"{name}: not in SPECDEC_DATA, not excluded", file=sys.stderr)
            continue
        for prompt in load_prompts(name=name, limit=None):
            texts = [prompt.message or prompt.text, *(message for _, message in prompt.later)]
            for text in texts:
                found |= ngrams(text)
    return found


def entry(kind: str, source: str, text: str) -> Entry:
    digest = hashlib.sha256(text.encode()).hexdigest()
    return {"kind": kind, "source": source, "sha256": digest, "text": text}


def chat(run: Path) -> Iterator[Entry]:
    """User messages that the target completed, without those it only began or repeated."""
    seen = set()
    for _, record in read_records(run / "requests.jsonl"):
        text = record["text"].split("<|im_end|>")[0].strip()
        if record["finish_reason"] != "eos" or not 12 <= len(text) <= 1200 or text in seen:
            continue
        seen.add(text)
        yield entry("chat", f"turn {record['id']}", text)


def math() -> Iterator[Entry]:
    """GSM8K's training questions, as ``data=gsm8k`` asks those of the test part."""
    path = Path(os.environ["SPECDEC_DATA"], "gsm8k", "train.jsonl.gz")
    for number, record in read_records(path):
        yield entry("math", f"gsm8k train {number}", record["question"])


def code() -> Iterator[Entry]:
    """Function heads of installed packages, worded as ``data=humaneval``."""
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            sys.exit(f"{package} is not installed; install it or remove it from PACKAGES")
        version = importlib.metadata.version("hydra-core" if package == "hydra" else package)
        for relative, path in python_files(Path(spec.origin).parent):
            text = read_source(path)
            for head in heads_of(text or "", relative):
                if len(head.text) <= MAX_CODE_CHARS:
                    yield entry("code", f"{package} {version} {head.place}", CODE.format(head.text))


def chosen(entries: Iterable[Entry], number: int, excluded: set[int]) -> list[Entry]:
    """``number`` entries in a random order that does not depend on the machine."""
    order = random.Random(SEED)
    pool = list({item["text"]: item for item in entries}.values())
    order.shuffle(pool)
    left = [item for item in pool if excluded.isdisjoint(ngrams(item["text"]))]
    kind = pool[0]["kind"] if pool else "none"
    print(f"{kind}: {len(pool)} prompts, {len(pool) - len(left)} overlap with evaluation sets")
    return left[:number]


def build(file: Path, run: Path, each: int) -> None:
    excluded = evaluation_ngrams()
    kinds = [chosen(entries, each, excluded) for entries in (chat(run), math(), code())]
    # Interleaved, so that every beginning of the file has all kinds.
    rows = [row for group in zip_longest(*kinds) for row in group if row is not None]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{len(rows)} prompts in {file}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("turns", "build"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--number", type=int, default=2400)
    parser.add_argument("--turns", type=Path)
    parser.add_argument("--each", type=int, default=2200)
    options = parser.parse_args()
    if options.command == "turns":
        line = json.dumps({"text": USER_TURN}) + "\n"
        options.file.write_text(line * options.number, encoding="utf-8")
    elif options.turns is None:
        parser.error("build needs --turns, the folder of the run that wrote the user turns")
    else:
        build(options.file, options.turns, options.each)


if __name__ == "__main__":
    main()
