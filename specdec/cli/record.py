from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from specdec.cli.arguments import Arguments, OneModel, help_of, read_values
from specdec.errors import UserError
from specdec.parts.fields import Text

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, kw_only=True)
class _Keys(OneModel):
    draft: Annotated[Text, "folder of the draft, or bundled:NAME"] = "bundled:draft"
    sampling: Annotated[Text, "the target's, under which candidates are scored"] = "greedy"
    target: Annotated[Text, "name of the target, for the tables"] = "not named"
    output_dir: Annotated[Text, "for record.npz"] = "outputs/record"


HELP = f"""\
specdec record TEXTS [key=value] ...

Records how a draft model ranks texts that a target wrote, for model=replay. The target is not
needed: its texts come from a log. TEXTS is a JSON lines file; a line has

  prompt_token_ids, output_token_ids   lists of token ids: the record equals record=true's
  prompt, completion                   text, tokenised by the draft's tokenizer
  id                                   optional; default: the number of the line from 0

{help_of(_Keys)}

A record has the draft's candidates on the target's path: chains and static trees replay exactly,
trees in which wrong nodes compete for places approximately. With the draft at hand these are exact
too: model=transcript model.texts=TEXTS model.draft=FOLDER (docs/replay.md).

Example
  specdec record answers.jsonl draft=models/llama-1b sampling=t06 output_dir=outputs/70b
  specdec compare 'strategies=[ar,specinfer]' model=replay model.record=outputs/70b/record.npz \\
      clock=simulated
"""


def main(arguments: Arguments) -> int:
    (name,), keys = read_values(arguments.overrides, _Keys, "one file of texts")
    path = Path(name).expanduser()
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
    folder = family_path(keys.draft, "draft")
    texts = _texts(path, folder)
    model = load_model(folder, dtype=keys.dtype, device=keys.device)
    runner = ModelRunner(model=model, name="draft", meter=Meter())
    if (most := max(int(ids.max()) for _, *parts in texts for ids in parts)) >= runner.vocab_size:
        raise UserError(
            f"{path} has the token {most}, but the draft has {runner.vocab_size}: its texts are of"
            " another tokenizer; give text in prompt and completion, or another draft"
        )
    record = Record(
        requests=tuple(
            record_request(runner, sampling, request_id=number, prompt=prompt, output=output)
            for number, prompt, output in texts
        ),
        vocab_size=runner.vocab_size,
        weight_bytes=(0, weight_bytes(folder, keys.dtype)),
        about={
            "strategy": "given texts",
            "model": {"target": keys.target, "draft": keys.draft},
            "data": path.name,
            "sampling": keys.sampling,
            "sampling_params": dict(config["sampling"]),
            "dtype": keys.dtype,
            "loop_share": loop_share([output.tolist() for _, _, output in texts]),
            "provenance": provenance(command=sys.argv, config=asdict(keys)),
        },
    )
    file = Path(keys.output_dir).expanduser() / "record.npz"
    write_record(file, record)
    tokens = sum(request.num_output for request in record.requests)
    shares = ", ".join(f"top-{k} {record.top_share(k):.3f}" for k in (1, 8, 32))
    print(f"{len(record.requests)} requests, {tokens} tokens: {shares}")
    print(f"record: {file}")
    return 0


def _texts(path: Path, folder: str) -> list[tuple[int, np.ndarray, np.ndarray]]:
    from specdec.data.texts import read_turns, tokenized
    from specdec.models.loading import load_tokenizer

    tokenizer = cache(lambda: load_tokenizer(folder))
    texts = {}
    for number, (where, entry, turn) in enumerate(read_turns(path)):
        given = entry.get("id", number)
        if type(given) is not int or given < 0:
            raise UserError(f"{where}: id={given} is not a whole number of at least 0")
        if given in texts:
            raise UserError(f"{path}: an id occurs twice; give every line a different one")
        texts[given] = (given, *tokenized(turn, tokenizer, where))
    if not texts:
        raise UserError(f"{path} has no texts")
    return [*texts.values()]
