import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from glob import glob
from math import inf
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from specdec.cli.arguments import Arguments, help_of, read_values
from specdec.files import write_text
from specdec.fitting.fit import fit_logs
from specdec.fitting.logs import FORMATS, Lengths, ReadOptions, read_log
from specdec.parts.fields import Count, Text

Name = Annotated[str, Field(pattern=r"^[\w.-]+$")]


@dataclass(frozen=True, kw_only=True)
class Keys:
    name: Annotated[Name, "of the option"] = "law"
    output_dir: Annotated[Text | None, "DIR, for DIR/model/NAME.yaml: --config-dir DIR"] = None
    method: Annotated[Text | None, "which of several pairs, methods or models in a file"] = None
    draft_tokens: Annotated[Count | None, "verified per pass, where the log does not say"] = None
    lengths: Annotated[Lengths, "emitted: lists count the target's token | accepted"] = "auto"
    passes: Annotated[Literal["chain", "tree"], "tree: a hit is any right node of a tree"] = "chain"
    predict: Annotated[Sequence[Count], "chain lengths to print; 1 to 20 by default"] = range(1, 21)
    check: Annotated[Sequence[Text], "FILE,FILE or pattern: the pair at another chain length"] = ()
    holdout: Annotated[int, Field(ge=2, le=99), "every third (or other) request is held out"] = 3
    draft: Annotated[Name | None, "name of the draft; profiles then need its time"] = None
    source: Annotated[Text, "origin of the logs, for the option's provenance"] = "acceptance logs"
    license: Annotated[str, "of the logs"] = ""


HELP = f"""\
specdec fit FILE... [key=value] ...

Fits a model of which draft tokens are accepted to measured acceptance, prints how well the model of
two thirds of the requests describes the others, and the tokens per pass that it predicts for chains
of other lengths. It writes a model option for every command, on any clock, tree and executor.

  FILE                   acceptance logs of one pair (or a pattern in quotes), JSON, JSON lines,
                         text or CSV, plain or gzip; more than one are pooled
{help_of(Keys)}

Formats: {FORMATS}.

Examples
  specdec fit responses.jsonl name=mine draft=my-1b output_dir=outputs/law
  specdec fit trace.jsonl.gz method=acc_eagle draft_tokens=7
  specdec compare 'strategies=[ar,speculative]' --config-dir outputs/law model=mine clock=simulated
"""


def main(arguments: Arguments) -> int:
    files, options = read_values(arguments.overrides, Keys, "acceptance logs", most=inf)
    others = ReadOptions(method=options.method, lengths=options.lengths)
    how = replace(others, draft_tokens=options.draft_tokens)
    fitted = fit_logs(
        [read_log(path, how) for path in _matching(files)],
        covers_tree=options.passes == "tree",
        holdout=options.holdout,
        checks=[read_log(path, others) for path in _matching(options.check)],
    )
    print(fitted.report(options.predict))
    if options.output_dir:
        stated = [word for word in arguments.overrides if not word.startswith("output_dir=")]
        command = shlex.join(["specdec", "fit", *stated])
        text = fitted.option_text(command, options.draft, options.source, options.license)
        path = Path(options.output_dir).expanduser() / "model" / f"{options.name}.yaml"
        print(f"model: {write_text(path, text)}")
        print(f"use it with --config-dir {options.output_dir} model={options.name}")
    return 0


def _matching(names: Sequence[str]) -> list[str]:
    paths = [str(Path(name).expanduser()) for name in names]
    return [found for path in paths for found in (sorted(glob(path)) or [path])]
