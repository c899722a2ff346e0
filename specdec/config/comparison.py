from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override

from specdec.config.checks import check_config
from specdec.config.hydra import Composed, compose_config, parse
from specdec.config.job import Job, checked_job
from specdec.config.options import PARTS, flatten, has_key, options
from specdec.errors import UserError
from specdec.parts.fields import did_you_mean

RESULT_FILE = "comparison.json"
"""If this file exists in a folder, the comparison is complete."""


_YARDSTICK_PARTS = ("source", "policy", "verifier")


@dataclass(frozen=True, slots=True)
class Comparison:
    """The checked jobs of ``specdec compare``, one per row.

    Attributes:
        repeats: number of interleaved measurements of every prompt.
        output_dir: None for the default folder.
        notices: overrides that do not apply to every row, and the jobs' notices.
    """

    jobs: tuple[Job, ...]
    repeats: int
    output_dir: str | None
    notices: tuple[str, ...]

    @property
    def config(self) -> dict[str, Any]:
        rows = {job.name: job.config for job in self.jobs}
        return {"command": "compare", "repeats": self.repeats, "strategies": rows}


def compose_comparison(overrides: Sequence[str], extra: Sequence[Path] = ()) -> Comparison:
    """Composes and checks every row; an override that applies to no row is a ``UserError``."""
    parsed = parse(overrides)
    if any(o.key_or_group == "strategy" for o in parsed):
        raise UserError(
            "compare takes several presets: write 'strategies=[ar,NAME]', not strategy="
        )
    # Only overrides of parts depend on the row; the others are composed and checked once.
    of_parts = [o for o in parsed if _part_of(o)]
    common = [text_of(o) for o in parsed if not _part_of(o)]
    base = compose_config(common, name="compare", extra=extra)
    names = _row_names(base.values["strategies"], extra)
    rows = [_compose_row([f"strategy={name}", *common], of_parts, extra) for name in names]
    check_config(base.values, base.choices)
    if base.values["trace"]:
        raise UserError("trace=true is for one strategy at a time: use it with `specdec run`")
    unused = {text_of(o): o for o in of_parts}
    jobs, notices = [], []
    for name, (composed, left_out) in zip(names, rows, strict=True):
        unused = {text: o for text, o in unused.items() if text in left_out}
        notices += [f"{text} does not apply to {name}" for text in left_out]
        jobs.append(checked_job(composed))
    for override in unused.values():
        raise UserError(_no_row(override, jobs))
    return Comparison(
        tuple(jobs),
        base.values["repeats"],
        base.values["output_dir"],
        tuple(dict.fromkeys([*notices, *(text for job in jobs for text in job.notices)])),
    )


def _compose_row(
    common: Sequence[str], of_parts: Sequence[Override], extra: Sequence[Path]
) -> tuple[Composed, list[str]]:
    """Composes one row with the overrides that apply to it; also returns those that do not.

    Composing takes a tenth of a second, so it is repeated only for overrides of parts.
    """
    row = compose_config(common, name="compare", extra=extra)
    fixed = _YARDSTICK_PARTS if row.values["strategy"].get("baseline") else ()
    left_out = [text_of(o) for o in of_parts if _part_of(o) in fixed]
    rest = [o for o in of_parts if _part_of(o) not in fixed]
    chosen = [text_of(o) for o in rest if o.key_or_group in PARTS]
    keys = {o.key_or_group for o in rest}
    has_stages = "executor" in keys or "stages" in row.values["executor"]
    if "executor.stages" in keys and not has_stages:
        chosen.append("executor=pipeline")
    if chosen:
        row = compose_config([*common, *chosen], name="compare", extra=extra)
    values: list[str] = []
    for override in rest:
        key = str(override.key_or_group)
        if key not in PARTS:
            fits = override.is_add() or has_key(row.values, key)
            (values if fits else left_out).append(text_of(override))
    if values:
        row = compose_config([*common, *chosen, *values], name="compare", extra=extra)
    return row, left_out


def _row_names(strategies: object, extra: Sequence[Path]) -> list[str]:
    known = options("strategy", extra)
    if not isinstance(strategies, list) or not strategies:
        raise UserError(
            f"strategies={strategies} must be a list of presets, as in 'strategies=[ar,staged]'"
        )
    names = [str(name) for name in strategies]
    for name in names:
        if name not in known:
            raise UserError(f"strategies: {name} is unknown: {did_you_mean(name, known)}")
        if names.count(name) > 1:
            raise UserError(f"strategies={names} names {name} twice: name each row once")
    return names


def _part_of(override: Override) -> str | None:
    """Returns the part whose key an override sets, if any; "strategy" for options of a baseline."""
    key = str(override.key_or_group)
    if key.startswith("strategy.options."):
        return "strategy"
    part = key.split(".")[0]
    return part if part in PARTS else None


def text_of(override: Override) -> str:
    """Returns the word of the command line that an override was parsed from."""
    assert override.input_line is not None, "every override was parsed from a word"
    return override.input_line


def _no_row(override: Override, jobs: Sequence[Job]) -> str:
    part = str(_part_of(override))
    known = {k for job in jobs for k in flatten({part: job.config.get(part, {})})}
    known = {k for k in known if not k.endswith("_target_")}
    hint = did_you_mean(str(override.key_or_group), known)
    return f"{text_of(override)} applies to none of the rows: " + (hint or f"no {part} has keys")
