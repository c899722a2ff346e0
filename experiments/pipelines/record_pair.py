"""Records a real pair on the papers' data sets, for simulated tables with its hits (`qwen_*`).

    python -m experiments.pipelines.record_pair FOLDER RUNS [SET ...]

FOLDER has the two GGUF files of ``FILES``; RUNS gets one run folder per set, and a set whose run
is complete there is not decoded again. Each record is stored beside this file in ``records`` with
the names and sha256 of the files in place of their paths. A set takes two to six minutes
on two cores and 10 GB of memory.
"""

from __future__ import annotations

import argparse
import hashlib
from dataclasses import replace
from pathlib import Path

from specdec.cli.main import main as specdec
from specdec.pairs.record import read_record, write_record

RECORDS = Path(__file__).with_name("records")
FILES = {
    "target": "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
    "draft": "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
}
SETS = (
    *("humaneval_x", "drop", "mmlu", "wmt14", "triviaqa", "gsm8k"),  # SpecPipe's and PipeDec's six
    *("humaneval", "mt_bench", "alpaca", "natural_questions", "cnn_dm"),  # and gsm8k: SwiftSpec
    "xsum",  # PPSD's, with gsm8k and humaneval
)
SIZE = ("data.limit=20", "data.sample_seed=1", "max_new_tokens=128", "sampling=greedy")
HOW = ("batch_size=20", "threads=2", "model.backend=eager", "record=true")


def record(name: str, folder: Path, runs: Path, hashes: dict[str, str]) -> None:
    """Decodes a set's prompts by plain decoding, ranks the tokens by the draft, stores the ranks.

    Raises:
        SystemExit: the run has failed.
    """
    run = runs / f"{name}-greedy"
    models = (f"model.path={folder / FILES['target']}", f"model.draft={folder / FILES['draft']}")
    words = ["run", "strategy=ar", "model=gguf", *models, f"data={name}", *SIZE, *HOW]
    if status := specdec([*words, f"output_dir={run}"]):
        raise SystemExit(status)
    found = read_record(run / "record.npz")
    about = dict(found.about)
    about["model"] = FILES
    about |= {"sha256": hashes, "prompts": " ".join(SIZE)}
    about["provenance"] = {key: about["provenance"][key] for key in ("time", "git", "versions")}
    write_record(RECORDS / f"qwen_{name}_greedy.npz", replace(found, about=about))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("runs", type=Path)
    parser.add_argument("sets", nargs="*", default=SETS)
    options = parser.parse_args()
    hashes = {}
    for name in FILES.values():
        with (options.folder / name).open("rb") as file:
            hashes[name] = hashlib.file_digest(file, "sha256").hexdigest()
    RECORDS.mkdir(exist_ok=True)
    for name in options.sets:
        record(name, options.folder, options.runs, hashes)


if __name__ == "__main__":
    main()
