"""Token samples of a model, for the n-gram model under a draft (Staged, 4).

    specdec run strategy=ar model=gguf model.path=DRAFT.gguf sampling=t1_k50 data=stdlib \\
        max_new_tokens=160 output_dir=RUN
    python -m experiments.staged.ngram_samples FILE.safetensors RUN...

The outputs of the runs follow each other, each with a token 0 behind it; ``model.ngram=FILE`` reads
them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from specdec.report.results import read_requests


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.staged.ngram_samples")
    parser.add_argument("file", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    options = parser.parse_args()
    texts = [
        [*record.result.output, 0]
        for run in options.runs
        for record in read_requests(run / "requests.jsonl")
    ]
    save_file({"tokens": np.concatenate(texts).astype(np.int32)}, options.file)
    print(f"{len(texts)} texts, {sum(map(len, texts)):,} tokens in {options.file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
