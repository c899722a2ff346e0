"""How much acceptance a draft keeps when its tokenizer is another one (``source=translated``).

    python -m experiments.drafters.other_tokenizer [--data humaneval] [--sampling t06]
        [--prompts 16] [--tokens 128]

The bundled draft with a renumbered vocabulary that has the first 100, 75, 50, 25 and 0 per cent of
the merges of the target's tokenizer, against the same draft as it is. The models are not trained on
the other tokenization, so what is kept is a lower bound for a draft that is. Simulated time; counts
do not depend on the machine. ``python -m experiments.drafters.page`` writes table and figure.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.drafters.measure import Runs, parsed, parser, write
from specdec.models.bundled import family_path
from specdec.models.loading import load_model
from specdec.models.vocabulary import fast_tokenizer, other_tokenizer, with_vocabulary

POLICIES = ("chain", "best_first")
PROFILE = "clock.profile=uniform_30ms"


def main(words: Sequence[str] | None = None) -> int:
    arguments = parser(__doc__ or "", "experiments.drafters.other_tokenizer")
    arguments.add_argument("--shares", type=int, nargs="+", default=[100, 75, 50, 25, 0])
    args = parsed(arguments, words)
    runs, rows = Runs(args), list[dict[str, Any]]()
    for policy in POLICIES:
        own = ("strategy=translated", f"policy={policy}", PROFILE)
        found = runs.measured("tokens per pass", *own, "source=draft_model")
        rows.append({"policy": policy, "merges": None, "shared": None, "measured": found})
        print(f"{policy:12} the target's tokenizer     {found}", flush=True)
        for share in args.shares:
            folder, shared = save_draft(args.out / f"draft-{share}", share)
            found = runs.measured("tokens per pass", *own, f"model.translated={folder}")
            rows.append({"policy": policy, "merges": share, "shared": shared, "measured": found})
            print(f"{policy:12} {share:3} % of merges, {shared:4} tokens  {found}", flush=True)
    write("other_tokenizer", runs.about, rows, args.results)
    return 0


def save_draft(folder: Path, share: int) -> tuple[Path, int]:
    """Writes the bundled draft with ``share`` per cent of the merges; returns tokens kept, too."""
    source = Path(family_path("bundled:draft"))
    described = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    merges = len(described["model"]["merges"]) * share // 100
    other, parts = other_tokenizer(described, merges=merges)
    if not (folder / "config.json").is_file():
        model = with_vocabulary(load_model(source), parts)
        end = other["model"]["vocab"]["<|end|>"]
        for config in (model.config, model.generation_config):
            config.bos_token_id = config.eos_token_id = config.pad_token_id = end
        model.save_pretrained(folder)
        fast_tokenizer(other, eos_token="<|end|>", bos_token="<|end|>").save_pretrained(folder)
    return folder, len(parts)


if __name__ == "__main__":
    sys.exit(main())
