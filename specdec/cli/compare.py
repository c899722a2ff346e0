import importlib.util
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from specdec.cli.arguments import Arguments
from specdec.cli.execute import RESULT_FILE, execute, print_notices, run_in, show_config
from specdec.config import folders
from specdec.config.folders import as_yaml, output_folder
from specdec.config.hydra import Words, compose_config, take
from specdec.config.job import (
    COMPARE,
    COMPARISON_FILE,
    Comparison,
    Job,
    compose_comparison,
    run_job_of,
)
from specdec.config.options import PARTS, Trees
from specdec.errors import UserError
from specdec.parts.fields import Count, errors_of

HELP = """\
specdec compare [--cfg] [--config-dir DIR] ['strategies=[NAME,...]'] [group=option] [key=value] ...

Runs several strategies on the same prompts with the same models, interleaved, and writes one table
and one plot: comparison.json, comparison.md, comparison.png, and requests.jsonl with every token.
Each row's tokens are compared with those of `ar`.

  strategies=[...]  presets, in the order of the rows; `specdec list strategies` shows them
                    (default [ar,speculative,specinfer,fixed_width,best_first,staged,
                    prompt_lookup,mixture])
  repeats=N         interleaved repeats (default 1); the table shows medians and ranges
  group=option, key=value
                    as for `specdec run`; they apply to every row. Overrides of source, policy and
                    verifier do not apply to `ar` and to transformers' own rows, and a key such as
                    policy.width applies to the rows whose policy has it
                    (defaults: model=tiny, the bundled pair; data=stdlib; sampling=greedy;
                    max_new_tokens=128)
  executor.stages=8 puts every row on a pipeline of so many stages
  'batch_size=[1,4,16]'
                    every row at each batch size: throughput and time between tokens as curves
  --cfg             print the resolved configuration of every row and stop
  --config-dir      a further configuration tree, with presets or options of your own

Examples
  specdec compare 'strategies=[ar,speculative,best_first,hf_assisted]' data=stdlib data.limit=8
  specdec compare 'strategies=[ar,specpipe]' executor.stages=8 clock=simulated
"""
FLAGS = ("--cfg",)

_CURVES = "experiments.pipelines.batch_curves"
_RECORDER = ("strategy=speculative", "record=true", "executor=local", "clock=measured")
_OTHERS = ("clock", "serving", "output_dir", "logger", "trace", "record", "prefill_chunk")
_NOT_RECORDED = frozenset([*PARTS, *COMPARE, *_OTHERS])
"""Groups and keys that are not passed to the recording run: they do not change the record."""


def main(arguments: Arguments) -> int:
    own, rest = take(arguments.overrides, "batch_size")
    if isinstance(sizes := own.get("batch_size"), list):
        return _curves(sizes, rest, arguments.config_dirs, only_show=bool(arguments.cfg))
    if arguments.cfg:
        return show_config(
            arguments, lambda *words: compose_comparison(*words).config, name="compare"
        )
    comparison = compose_comparison(arguments.overrides, arguments.config_dirs)
    print_notices(comparison.notices)
    execute(comparison, output_folder(comparison.output_dir, "compare"))
    return 0


@dataclass(frozen=True, slots=True)
class Curves:
    """Every row at several batch sizes (``'batch_size=[1,2,4]'``), as curves."""

    sizes: Annotated[tuple[Count, ...], Field(min_length=1)]  # batch sizes, increasing
    comparison: Comparison  # the rows, composed at the largest size
    # an additional row, plain decoding on another latency profile; None for no such row
    cross: Job | None
    # the run that is recorded and then replayed by every row; None if rows load models
    record: Job | None

    @property
    def config(self) -> dict[str, Any]:
        cross = {} if self.cross is None else {"cross": self.cross.config}
        return {**self.comparison.config, "batch_sizes": list(self.sizes), **cross}

    def rows(self, size: int) -> list[dict[str, Any]]:
        jobs = [*self.comparison.jobs, *([self.cross] if self.cross else [])]
        return [{**job.config, "batch_size": size} for job in jobs]


def _curves(sizes: Sequence[int], overrides: Words, extra: Trees, *, only_show: bool) -> int:
    if importlib.util.find_spec(_CURVES.partition(".")[0]) is None:
        raise UserError(
            f"batch_size={list(sizes)} draws SpecPipe's curves, which are in the package"
            " experiments of a clone: run it in one (pip install -e .), or sweep without curves:"
            " specdec run -m batch_size=1,2,4"
        )
    folder = output_folder(take(overrides, "output_dir")[0].get("output_dir"), "compare")
    curves = compose_curves(sizes, overrides, folder, extra)
    comparison, record, cross = curves.comparison, curves.record, curves.cross
    print_notices(comparison.notices)
    if only_show:
        print(as_yaml(curves.config), end="")
        return 0

    def work(progress: Any) -> bool:
        from specdec.runs.jobs import run_job

        if record is not None:
            at, config = folder / "record", record.config
            folders.run_in(at, config, RESULT_FILE, lambda: run_job(config, at, progress))
        rows, name = {size: curves.rows(size) for size in curves.sizes}, cross and cross.name
        draw = importlib.import_module(_CURVES).curve_jobs
        draw(rows, folder, comparison.repeats, progress, cross=name)
        return True

    table = folder / "comparison.md"
    if run_in(folder, curves.config, COMPARISON_FILE, work, table=table.name):
        print(table.read_text(encoding="utf-8"))
        print(f"results in {folder}")
    return 0


def compose_curves(
    sizes: Sequence[int], overrides: Words, folder: Path, extra: Trees = ()
) -> Curves:
    for error in errors_of(Curves, {"sizes": sizes}):
        raise UserError(error.replace("sizes", "batch_size", 1))
    own = ("curve_profile", "cross_profile", "curve_replay", "clock", "model")
    words = [w for w in overrides if w.partition("=")[0] in own]
    base = compose_config(words, name="compare", extra=extra).values
    simulated = base["clock"]["kind"] == "simulated"
    rest, notices, record, cross = [*overrides, f"batch_size={max(sizes)}"], list[str](), None, None
    given, _ = take(overrides, "clock.profile")
    profile = given.get("clock.profile", base["curve_profile"])
    if simulated and not given:
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
        (plain,), name = compose_comparison(words, extra).jobs, f"ar on {base['cross_profile']}"
        strategy = {**plain.config["strategy"], "name": name}
        cross = Job(name, {**plain.config, "strategy": strategy}, None)
    comparison = replace(comparison, notices=(*notices, *comparison.notices))
    return Curves(tuple(sorted(set(sizes))), comparison, cross, record)


def _without(words: Words, groups: Collection[str]) -> list[str]:
    return [w for w in words if w.partition("=")[0].partition(".")[0] not in groups]
