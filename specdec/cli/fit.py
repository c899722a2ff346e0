"""``specdec fit`` fits an acceptance model to acceptance measured elsewhere."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from glob import glob
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from specdec.cli.arguments import read_arguments
from specdec.errors import UserError
from specdec.files import write_text
from specdec.fitting.fit import fit_logs
from specdec.fitting.logs import FORMATS, Lengths, ReadOptions, read_log
from specdec.parts.fields import Count, Text, did_you_mean, validated

HELP = f"""\
specdec fit FILE... [key=value] ...

Fits a model of which draft tokens are accepted to measured acceptance, prints how well the model of
two thirds of the requests describes the others, and the tokens per pass that it predicts for chains
of other lengths. It writes a model option for every command, on any clock, tree and executor.

  FILE                 acceptance logs of one pair (or a pattern in quotes), JSON, JSON lines, text
                       or CSV, plain or gzip; more than one are pooled
  name=NAME            of the option (law)
  output_dir=DIR       writes DIR/model/NAME.yaml: --config-dir DIR model=NAME
  method=NAME          which of several pairs, methods or models in a file
  draft_tokens=K       verified draft tokens per pass, where the log does not say
  lengths=auto         emitted | accepted: whether lists count the target's own token
  passes=chain         tree: the passes verified trees; a hit is then any right node of a tree
  predict=[1,3,7]      chain lengths (draft tokens) to print; 1 to 20 by default
  check=FILE           a log of the same pair at another chain length; [FILE,FILE] or a pattern
  holdout=3            every third request is held out for the check
  draft=NAME           of the draft; profiles then need its time
  source=TEXT license=TEXT
                       origin of the logs, for the option's provenance

Formats: {FORMATS}.

Examples
  specdec fit responses.jsonl name=mine draft=my-1b output_dir=outputs/law
  specdec fit trace.jsonl.gz method=acc_eagle draft_tokens=7
  specdec compare 'strategies=[ar,speculative]' --config-dir outputs/law model=mine clock=simulated
"""

Name = Annotated[str, Field(pattern=r"^[\w.-]+$")]


@validated
@dataclass(frozen=True, slots=True, kw_only=True)
class FitOptions:
    """The keys of the command, as its help describes them."""

    name: Name = "law"
    output_dir: Text | None = None
    method: Text | None = None
    draft_tokens: Count | None = None
    lengths: Lengths = "auto"
    passes: Literal["chain", "tree"] = "chain"
    predict: tuple[Count, ...] = tuple(range(1, 21))
    check: tuple[Text, ...] = ()
    holdout: Annotated[int, Field(ge=2, le=99)] = 3
    draft: Name | None = None
    source: Text = "acceptance logs"
    license: str = ""


def main(words: Sequence[str]) -> int:
    files, options = _arguments(words)
    others = ReadOptions(method=options.method, lengths=options.lengths)
    how = replace(others, draft_tokens=options.draft_tokens)
    fitted = fit_logs(
        [read_log(path, how) for path in files],
        covers_tree=options.passes == "tree",
        holdout=options.holdout,
        checks=[read_log(path, others) for path in _matching(options.check)],
    )
    print(fitted.report(options.predict))
    if options.output_dir:
        stated = [word for word in words if not word.startswith("output_dir=")]
        command = shlex.join(["specdec", "fit", *stated])
        text = fitted.option_text(command, options.draft, options.source, options.license)
        path = Path(options.output_dir).expanduser() / "model" / f"{options.name}.yaml"
        print(f"model: {write_text(path, text)}")
        print(f"use it with --config-dir {options.output_dir} model={options.name}")
    return 0


def _arguments(words: Sequence[str]) -> tuple[list[str], FitOptions]:
    """Returns the log files and the options; of ``[a,b]`` and of whole numbers the values."""
    known = [field.name for field in fields(FitOptions)]
    files: list[str] = []
    values: dict[str, Any] = {}
    for word in read_arguments(words, flags=()).overrides:
        key, equals, value = word.partition("=")
        if not equals or (key not in known and Path(word).expanduser().exists()):
            files.append(word)
        elif key not in known:
            raise UserError(f"{word} is not an option: {did_you_mean(key, known)}")
        elif key in ("predict", "check"):
            values[key] = [_number(part) for part in value.strip("[]").split(",")]
        else:
            values[key] = _number(value) if key in ("draft_tokens", "holdout") else value
    if not files:
        raise UserError("specdec fit needs at least one acceptance log: see `specdec fit --help`")
    try:
        return _matching(files), FitOptions(**values)
    except ValueError as error:
        raise UserError(str(error)) from error


def _number(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _matching(names: Sequence[str]) -> list[str]:
    """Returns the files that patterns match; other names as they are."""
    paths = [str(Path(name).expanduser()) for name in names]
    return [found for path in paths for found in (sorted(glob(path)) or [path])]
