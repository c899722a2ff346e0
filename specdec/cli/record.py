"""``specdec record`` scores given texts with a draft model, for ``model=replay``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.cli.arguments import Arguments, OneModel, read_values
from specdec.errors import UserError
from specdec.parts.fields import Text

if TYPE_CHECKING:
    import numpy as np

HELP = """\
specdec record TEXTS [draft=FOLDER] [sampling=NAME] [target=NAME] [dtype=TYPE] [device=NAME]
               [output_dir=DIR]

Records how a draft model ranks texts that a target wrote, for model=replay. The target is not
needed: its texts come from a log. TEXTS is a JSON lines file; a line has

  prompt_token_ids, output_token_ids   lists of token ids: the record equals record=true's
  prompt, completion                   text, tokenised by the draft's tokenizer
  id                                   optional; default: the number of the line from 0

  draft=FOLDER      folder of the draft, or bundled:NAME (default bundled:draft)
  sampling=NAME     the target's sampling, under which the draft's candidates are scored (greedy)
  target=NAME       name of the target, for the tables
  dtype=, device=   of the draft (float32, cpu)
  output_dir=DIR    for record.npz (default outputs/record)

A record has the draft's candidates on the target's path: chains and static trees replay exactly,
trees in which wrong nodes compete for places approximately. With the draft at hand these are exact
too: model=transcript model.texts=TEXTS model.draft=FOLDER (docs/replay.md).

Example
  specdec record answers.jsonl draft=models/llama-1b sampling=t06 output_dir=outputs/70b
  specdec compare 'strategies=[ar,specinfer]' model=replay model.record=outputs/70b/record.npz \\
      clock=simulated
"""


@dataclass(frozen=True, kw_only=True)
class _Keys(OneModel):
    draft: Text = "bundled:draft"
    sampling: Text = "greedy"
    target: Text = "not named"
    output_dir: Text = "outputs/record"


def main(arguments: Arguments) -> int:
    (name,), keys = read_values(arguments.overrides, _Keys, "one file of texts")
    path = Path(name).expanduser()
    # Imported here: torch and transformers take seconds to import.
    from specdec.clocks.meter import Meter
    from specdec.config.job import run_job_of
    from specdec.metrics import loop_share
    from specdec.models.bundled import family_path
    from specdec.models.loading import load_model, weight_bytes
    from specdec.models.runner import ModelRunner
    from specdec.pairs.record import Record, record_request, write_record
    from specdec.report.provenance import provenance
    from specdec.runs.runners import sampling_params

    config = run_job_of(["strategy=ar", "model=random", f"sampling={keys.sampling}"]).config
    sampling = sampling_params(config["sampling"])
    folder = family_path(keys.draft)
    texts = _texts(path, folder)
    model = load_model(folder, dtype=keys.dtype, device=keys.device)
    runner = ModelRunner(model=model, name="draft", meter=Meter())
    _check_tokens(texts, runner.vocab_size, path)
    requests = [
        record_request(runner, sampling, request_id=number, prompt=prompt, output=output)
        for number, prompt, output in texts
    ]
    about = {
        "strategy": "given texts",
        "model": {"target": keys.target, "draft": keys.draft},
        "data": path.name,
        "sampling": keys.sampling,
        "sampling_params": dict(config["sampling"]),
        "dtype": keys.dtype,
        "loop_share": loop_share([output.tolist() for _, _, output in texts]),
        "provenance": provenance(command=sys.argv, config=asdict(keys)),
    }
    record = Record(
        requests=tuple(requests),
        vocab_size=runner.vocab_size,
        weight_bytes=(0, weight_bytes(folder, keys.dtype)),
        about=about,
    )
    file = Path(keys.output_dir).expanduser() / "record.npz"
    write_record(file, record)
    tokens = sum(request.num_output for request in requests)
    shares = ", ".join(f"top-{k} {record.top_share(k):.3f}" for k in (1, 8, 32))
    print(f"{len(requests)} requests, {tokens} tokens: {shares}")
    print(f"record: {file}")
    return 0


def _texts(path: Path, folder: str) -> list[tuple[int, np.ndarray, np.ndarray]]:
    """Reads (id, prompt int64[T], output int64[L]) from each line."""
    from specdec.data.texts import read_turns, tokenized
    from specdec.models.loading import load_tokenizer

    if not path.is_file():
        raise UserError(f"{path}: no such file of texts")
    tokenizer = cache(lambda: load_tokenizer(folder))
    texts = []
    for number, (where, entry, turn) in enumerate(read_turns(path)):
        given = entry.get("id", number)
        if type(given) is not int or given < 0:
            raise UserError(f"{where}: id={given} is not a whole number of at least 0")
        texts.append((given, *tokenized(turn, tokenizer, where)))
    if not texts:
        raise UserError(f"{path} has no texts")
    if len({number for number, _, _ in texts}) < len(texts):
        raise UserError(f"{path}: an id occurs twice; give every line a different one")
    return texts


def _check_tokens(
    texts: Sequence[tuple[int, np.ndarray, np.ndarray]], vocab_size: int, path: Path
) -> None:
    most = max(int(ids.max()) for _, *parts in texts for ids in parts)
    if most >= vocab_size:
        raise UserError(
            f"{path} has the token {most}, but the draft has {vocab_size}: its texts are of another"
            " tokenizer; give text in prompt and completion, or another draft"
        )
