"""``specdec compare 'batch_size=[1,2,4]'``: every row at several batch sizes, as curves."""

import importlib.util
from collections.abc import Collection, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from specdec.cli.execute import print_notices, run_in
from specdec.config.folders import as_yaml, claim, output_folder
from specdec.config.hydra import compose_config, parse
from specdec.config.job import (
    COMPARE,
    COMPARISON_FILE,
    Comparison,
    Job,
    compose_comparison,
    run_job_of,
)
from specdec.config.options import PARTS
from specdec.errors import UserError
from specdec.parts.fields import Count, errors_of

TABLE = "comparison.md"
_CURVES = "experiments.pipelines.batch_curves"
_RECORDER = ("strategy=speculative", "record=true", "executor=local", "clock=measured")
_OTHERS = ("clock", "serving", "output_dir", "logger", "trace", "record", "prefill_chunk")
_NOT_RECORDED = frozenset([*PARTS, *COMPARE, *_OTHERS])
"""Groups and keys that are not passed to the recording run: they do not change the record."""


@dataclass(frozen=True, slots=True)
class Curves:
    sizes: Annotated[tuple[Count, ...], Field(min_length=1)]  # batch sizes, increasing
    comparison: Comparison  # the rows, composed at the largest size
    # an additional row, plain decoding on another latency profile; None for no such row
    cross: Job | None
    # the run that is recorded and then replayed by every row; None if rows load models
    record: Job | None

    @property
    def config(self) -> dict[str, Any]:
        extra: dict[str, Any] = {"batch_sizes": list(self.sizes)}
        if self.cross is not None:
            extra["cross"] = self.cross.config
        return {**self.comparison.config, **extra}

    def rows(self, size: int) -> list[dict[str, Any]]:
        jobs = [*self.comparison.jobs, *([] if self.cross is None else [self.cross])]
        return [{**deepcopy(job.config), "batch_size": size} for job in jobs]


def curves(
    sizes: Sequence[int], overrides: Sequence[str], extra: Sequence[Path], *, only_show: bool
) -> int:
    if importlib.util.find_spec(_CURVES.partition(".")[0]) is None:
        raise UserError(
            f"batch_size={list(sizes)} draws SpecPipe's curves, which are in the package"
            " experiments of a clone: run it in one (pip install -e .), or sweep without curves:"
            " specdec run -m batch_size=1,2,4"
        )
    named = [str(o.value()) for o in parse(overrides) if o.key_or_group == "output_dir"]
    folder = output_folder(named[-1] if named else None, "compare")
    composed = compose_curves(sizes, overrides, folder, extra)
    print_notices(composed.comparison.notices)
    work = partial(_run, composed, folder)
    if only_show:
        print(as_yaml(composed.config), end="")
    elif run_in(folder, composed.config, COMPARISON_FILE, work, table=TABLE):
        print((folder / TABLE).read_text(encoding="utf-8"))
        print(f"results in {folder}")
    return 0


def compose_curves(
    sizes: Sequence[int], overrides: Sequence[str], folder: Path, extra: Sequence[Path] = ()
) -> Curves:
    for error in errors_of(Curves, {"sizes": sizes}):
        raise UserError(error.replace("sizes", "batch_size", 1))
    own = ("curve_profile", "cross_profile", "curve_replay", "clock", "model")
    words = [w for w in overrides if w.partition("=")[0] in own]
    base = compose_config(words, name="compare", extra=extra).values
    simulated = base["clock"]["kind"] == "simulated"
    rest, notices, record, cross = [*overrides, f"batch_size={max(sizes)}"], list[str](), None, None
    profiles = [o.value() for o in parse(overrides) if o.key_or_group == "clock.profile"]
    profile = profiles[-1] if profiles else base["curve_profile"]
    if simulated and not profiles:
        rest.append(f"clock.profile={profile}")
        notices.append(f"curves over batch sizes are on clock.profile={profile} (curve_profile)")
    if simulated and base["curve_replay"] and base["model"]["kind"] in ("pretrained", "random"):
        record = run_job_of([*_RECORDER, *_without(overrides, _NOT_RECORDED)], extra)
        rest = _without(rest, ("model",))
        rest += ["model=replay", f"model.record={folder / 'record' / 'record.npz'}"]
        notices.append("prompts are recorded once (folder record) and replayed by every row")
    comparison = compose_comparison(rest, extra)
    with_ar = simulated and any(job.name == "ar" for job in comparison.jobs)
    if with_ar and profile == base["curve_profile"] and base["cross_profile"]:
        # Plain decoding on another profile, a row that is not the baseline of speed-ups.
        words = _without(rest, (*PARTS[:3], "strategies"))
        words += ["strategies=[ar]", f"clock.profile={base['cross_profile']}"]
        config = deepcopy(compose_comparison(words, extra).jobs[0].config)
        config["strategy"]["name"] = f"ar on {base['cross_profile']}"
        cross = Job(config["strategy"]["name"], config, None)
    comparison = replace(comparison, notices=(*notices, *comparison.notices))
    return Curves(tuple(sorted(set(sizes))), comparison, cross, record)


def _without(words: Sequence[str], groups: Collection[str]) -> list[str]:
    return [w for w in words if w.partition("=")[0].partition(".")[0] not in groups]


def _run(composed: Curves, folder: Path, progress: Any) -> bool:
    # Imported here: torch and transformers take seconds to import.
    from specdec.runs.jobs import run_job

    if composed.record is not None:
        record_folder = folder / "record"
        if not claim(record_folder, composed.record.config, "summary.json"):
            run_job(composed.record.config, record_folder, progress)
    rows = {size: composed.rows(size) for size in composed.sizes}
    cross = None if composed.cross is None else composed.cross.name
    curves = importlib.import_module(_CURVES)
    curves.curve_jobs(rows, folder, composed.comparison.repeats, progress, cross=cross)
    return True
