"""Quality of a model in nats per byte of one held-out text, whatever its tokenizer.

    python -m experiments.smollm2.quality MODEL_FOLDER [--dtype float32]

The text is the first 200,000 bytes of WikiText-2's test part (``SPECDEC_DATA``). The model reads
windows of 1,024 tokens of which the last 512 are scored (the first window whole), so every scored
token but the first has at least 512 tokens of context from then on. The sum of negative log
probabilities is divided by the bytes of the scored text, which makes models with different
tokenizers, quantisations and runtimes comparable.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdec.data.files import read_text

NUM_BYTES = 200_000
WINDOW, STEP = 1024, 512


def nats_per_byte(folder: str, dtype: str) -> float:
    whole = read_text(Path(os.environ["SPECDEC_DATA"], "wikitext2", "test.txt.gz"))
    text = whole.encode()[:NUM_BYTES].decode(errors="ignore")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    ids = torch.tensor(tokenizer.encode(text, add_special_tokens=False))
    total, scored = 0.0, 1  # the first token has no context and is not scored
    with torch.inference_mode():
        for start in range(0, max(len(ids) - STEP, 1), STEP):
            window = ids[start : start + WINDOW]
            logprobs = model(window[None]).logits[0, :-1].double().log_softmax(-1)
            targets = window[1:]
            first = scored - start - 1
            rows = logprobs[first:].gather(1, targets[first:, None])
            total -= float(rows.sum())
            scored = start + len(window)
    first_bytes = len(tokenizer.decode(ids[:1]).encode())
    return total / (len(text.encode()) - first_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder")
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    value = nats_per_byte(options.folder, options.dtype)
    print(f"{options.folder} {options.dtype}: {value:.4f} nats per byte")


if __name__ == "__main__":
    main()
