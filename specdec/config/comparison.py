from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    # Only overrides of parts depend on the row.
    of_parts = {text_of(o): o for o in parsed if _part_of(o)}
    common = [text_of(o) for o in parsed if not _part_of(o)]
    base = compose_config(common, name="compare", extra=extra)
    names = _row_names(base.values["strategies"], extra)
    rows = [_compose_row([f"strategy={name}", *common], of_parts, extra) for name in names]
    check_config(base.values, base.choices)
    if base.values["trace"]:
        raise UserError("trace=true is for one strategy at a time: use it with `specdec run`")
    jobs = [checked_job(row) for row, _ in rows]
    notices, unused = list[str](), list(of_parts)
    for name, (_, left_out) in zip(names, rows, strict=True):
        notices += [f"{text} does not apply to {name}" for text in left_out]
        unused = [text for text in unused if text in left_out]
    if unused:
        raise UserError(_no_row(of_parts[unused[0]], jobs))
    notices += [text for job in jobs for text in job.notices]
    return Comparison(
        tuple(jobs),
        base.values["repeats"],
        base.values["output_dir"],
        tuple(dict.fromkeys(notices)),
    )


def _compose_row(
    common: Sequence[str], of_parts: Mapping[str, Override], extra: Sequence[Path]
) -> tuple[Composed, list[str]]:
    """Composes one row with the overrides that apply to it; also returns those that do not."""
    row = compose_config(common, name="compare", extra=extra)
    fixed = _YARDSTICK_PARTS if row.values["strategy"].get("baseline") else ()
    rest = {text: str(o.key_or_group) for text, o in of_parts.items() if _part_of(o) not in fixed}
    chosen = [text for text, key in rest.items() if key in PARTS]
    has_stages = "executor" in rest.values() or "stages" in row.values["executor"]
    if "executor.stages" in rest.values() and not has_stages:
        chosen.append("executor=pipeline")
    if chosen:
        row = compose_config([*common, *chosen], name="compare", extra=extra)
    values = [
        text
        for text, key in rest.items()
        if key not in PARTS and (of_parts[text].is_add() or has_key(row.values, key))
    ]
    if values:
        row = compose_config([*common, *chosen, *values], name="compare", extra=extra)
    return row, [text for text in of_parts if text not in {*chosen, *values}]


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
