"""``specdec fit`` fits an acceptance model (a law of hits) to acceptance measured elsewhere."""

from __future__ import annotations

import glob
import json
import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from specdec.cli.arguments import Arguments, read_values
from specdec.errors import UserError
from specdec.files import write_text
from specdec.fitting.fit import FittedLaw, HeldOutCheck, fit_logs
from specdec.fitting.logs import FORMATS, Lengths, ReadOptions, read_log
from specdec.parts.fields import Text

HELP = f"""\
specdec fit FILE... [key=value] ...

Fits a law of a draft's hits to measured acceptance, prints how well the law of two thirds of the
requests describes the others, and the tokens per pass that it predicts for chains of other lengths.
It writes a model option that every command takes, on any clock, tree and executor.

  FILE                 acceptance logs of one pair (or a pattern in quotes), JSON, JSON lines, text
                       or CSV, plain or gzip; more than one are pooled
  name=NAME            of the option (law)
  output_dir=DIR       writes DIR/model/NAME.yaml: --config-dir DIR model=NAME
  method=NAME          which of several pairs, methods or models in a file
  draft_tokens=K       verified draft tokens per pass, where the log does not say
  lengths=auto         emitted | accepted: whether lists count the target's own token
  passes=chain         tree: the passes verified trees; the law then says how often a tree was right
  predict=1,3,7        chain lengths (draft tokens) to print; 1 to 20 by default
  check=FILE           a log of the same pair at another chain length; several, or a pattern
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

_Number = Annotated[int, Field(ge=1, lt=1000)]


@dataclass(frozen=True, kw_only=True)
class _Keys:
    name: Annotated[Text, Field(pattern=r"^[A-Za-z][\w.-]*$")] = "law"
    output_dir: Text | None = None
    method: Text | None = None
    draft_tokens: Annotated[int, Field(ge=1, lt=10_000)] | None = None
    lengths: Lengths = "auto"
    passes: Literal["chain", "tree"] = "chain"
    predict: Sequence[_Number] = tuple(range(1, 21))
    check: Sequence[Text] = ()
    holdout: Annotated[int, Field(ge=2, lt=100)] = 3
    draft: Text | None = None
    source: Text = "acceptance logs"
    license: Text | None = None


_MEANING = {
    "weights": "how often each class of positions is drawn, over all groups",
    "top1": "chance that the draft's first candidate is right",
    "decay": "how fast the chance falls with the rank",
    "miss": "share of the rest that no candidate gets right",
    "group_shares": "share of the prompts in each group",
    "group_weights": "`weights` of each group",
    "stay": "chance to keep the class at the next position",
    "depth": "added to the log odds of top1 by distance from the root",
    "covers": "a hit is some node of the measured tree",
    "requests": "that it was fitted to, for intervals",
    "draft_name": "whose hits: the profile must have its time",
    "origin": "of the law, for result files",
}
"""Key of the option -> comment beside it in the YAML."""


def main(arguments: Arguments) -> int:
    names, keys = read_values(arguments.overrides, _Keys, "acceptance logs", most=inf)
    options = ReadOptions(method=keys.method, lengths=keys.lengths, draft_tokens=keys.draft_tokens)
    others = ReadOptions(method=keys.method, lengths=keys.lengths)
    logs = [read_log(path, options) for name in names for path in _matching(name)]
    fitted = fit_logs(
        logs,
        covers_tree=keys.passes == "tree",
        holdout=keys.holdout,
        checks=[read_log(path, others) for name in keys.check for path in _matching(name)],
    )
    forms = ", ".join(dict.fromkeys(log.form for log in logs))
    print(f"{len(logs)} file{'s' if len(logs) > 1 else ''} ({forms})")
    print("\n".join(_report(fitted, keys.predict)))
    if keys.output_dir is not None:
        stated = [word for word in arguments.overrides if not word.startswith("output_dir=")]
        command = shlex.join(["specdec", "fit", *stated])
        path = Path(keys.output_dir).expanduser() / "model" / f"{keys.name}.yaml"
        write_text(path, option_text(fitted, keys, command))
        print(f"law: {path}")
        print(f"use it with --config-dir {keys.output_dir} model={keys.name}")
    return 0


def option_text(fitted: FittedLaw, keys: _Keys, command: str) -> str:
    """Returns the YAML of a model option, with the law's provenance as comments."""
    about = [
        f"Law of hits by `specdec fit`: {keys.source}",
        f"{fitted.requests} requests, {fitted.draft_tokens:.0f} draft tokens;"
        f" ranks: {fitted.tail_source}",
        *([f"licence of the data: {keys.license}"] if keys.license else []),
        *(_check_line(fitted.goodness.check) if fitted.goodness else ()),
        *fitted.notes,
        command,
    ]
    option: dict[str, Any] = {
        **fitted.model_option(),
        # A single request is a summary, which has no spread between requests.
        **({"requests": fitted.requests} if fitted.requests > 1 else {}),
        "draft_name": keys.draft,
        "origin": keys.source,
    }
    lines = [f"# {line}" for text in about for line in _wrapped(text)]
    lines += ["defaults:", "  - synthetic", "  - _self_"]
    lines += [f"{k}: {json.dumps(v)}  # {_MEANING[k]}" for k, v in option.items()]
    return "\n".join(lines) + "\n"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 96, break_on_hyphens=False, break_long_words=False)


def _matching(word: str) -> list[Path]:
    """Returns the named file, or the files that a glob pattern matches."""
    path = Path(word).expanduser()
    if path.exists() or not glob.has_magic(word):
        return [path]
    matches = sorted(glob.glob(str(path)))
    if not matches:
        raise UserError(f"no file fits {word!r}")
    return [Path(name) for name in matches]


def _report(fitted: FittedLaw, lengths: Sequence[int]) -> list[str]:
    law = fitted.law
    lines = [f"note: {note}" for note in fitted.notes]
    groups, classes = law.weights.shape
    by_depth = "hit rates by depth" if law.depth.any() else "no dependence on the depth"
    lines += [
        f"fitted to {fitted.requests} requests, {fitted.draft_tokens:.0f} draft tokens: {groups}"
        f" group{'s' * (groups > 1)} of prompts, {classes} class{'es' * (classes > 1)} of"
        f" positions, {by_depth}",
        f"hit rate of the first draft token {law.hit_rate():.3f}; ranks by {fitted.tail_source}:"
        f" decay {fitted.tail.decay:.2f}, beyond 64 {fitted.tail.miss:.1%} of the misses",
    ]
    good = fitted.goodness
    if good is not None:
        lines += _check_line(good.check)
        lines.append(
            f"  log likelihood {good.gain:+.4f} nats per draft token against one constant hit rate;"
            f" spread of tokens per pass between requests {good.spread:.3f}, law"
            f" {good.law_spread:.3f}, constant hit rate {good.binomial_spread:.3f}"
        )
    for check in fitted.checks:
        lines += _check_line(check)
    if fitted.covers_tree:
        deep = max(len(law.depth) - 1, 1)  # the last depth is that of the bonus token
        lines.append(
            f"tokens per pass of its tree of depth {deep}: {law.tokens_per_pass(deep):.3f}"
        )
        return lines
    lines.append("draft tokens per pass -> tokens per pass:")
    cells = [f"{k}: {law.tokens_per_pass(k):.3f}" for k in lengths]
    lines += ["  " + "  ".join(cells[at : at + 7]) for at in range(0, len(cells), 7)]
    return lines


def _check_line(check: HeldOutCheck) -> list[str]:
    interval = (
        f" (95 % interval {check.low:.3f} to {check.high:.3f},"
        f" {'inside' if check.is_inside else 'outside'})"
        if check.low == check.low
        else ""
    )
    return [
        f"{check.name}: {check.requests} requests, {check.draft_tokens:.1f} draft tokens per pass:"
        f" measured {check.measured:.3f} tokens per pass, predicted {check.predicted:.3f},"
        f" {check.error:+.1%}{interval}"
    ]
