from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specdec.config.hydra import parse
from specdec.config.job import run_job_of
from specdec.errors import UserError
from specdec.planning.acceptance import Acceptance, of_log, of_model
from specdec.planning.checking import units_of_run
from specdec.planning.machines import Machine, machine_of
from specdec.planning.options import MEASURED, PlanOptions, split_words

_REFUSED = {
    "strategy": "a plan chooses the strategy (strategies=[...] limits the choice)",
    "clock": "a plan is simulated on profile=",
    "executor": "a plan chooses the layout (devices= limits it)",
    "policy": "a plan chooses the sizes",
    "source": "a plan chooses the source",
    "batch_size": "use batch=",
    "record": "a plan records where it has to",
    "trace": "trace the planned strategy instead",
}


@dataclass(frozen=True, slots=True)
class Planning:
    """A checked request for a plan.

    Attributes:
        chosen: options of the plan itself.
        words: all other command-line words, which are overrides of the configuration.
        extra: further configuration trees.
        machine: None if it has to be measured first.
        acceptance: None if models have to decode first.
    """

    chosen: PlanOptions
    words: tuple[str, ...]
    extra: tuple[Path, ...]
    config: Mapping[str, Any]
    machine: Machine | None
    acceptance: Acceptance | None
    output_dir: str | None = None

    @property
    def claimed(self) -> dict[str, Any]:
        """The content of config.yaml: everything but ``check``, which may be added later."""
        kept = asdict(self.chosen)
        del kept["check"]
        lists = {k: list(v) if isinstance(v, tuple) else v for k, v in kept.items()}
        words = [word for word in self.words if not word.startswith("output_dir=")]
        return {"command": "plan", **lists, "overrides": words}


def planning_of(
    words: Sequence[str], extra: Sequence[Path] = (), keys: Mapping[str, Any] | None = None
) -> Planning:
    """Checks the words of the command line before anything is decoded.

    ``extra`` are further configuration trees; ``keys`` are options of the plan in place of words.
    """
    chosen, rest = split_words(words, keys or {})
    for override in parse(rest):
        section = str(override.key_or_group).lstrip("+~").partition(".")[0]
        if section in _REFUSED:
            raise UserError(f"{override.input_line}: {_REFUSED[section]}; leave it out")
    job = run_job_of(rest, extra)
    config = job.config
    acceptance = of_log(chosen) if chosen.acceptance else of_model(config["model"])
    if acceptance is None and config["model"]["kind"] not in ("pretrained", "random"):
        raise UserError(
            f"model.kind={config['model']['kind']} has no hits of a draft to plan with: use"
            " model=hf, tiny, replay or a law, or acceptance=FILE"
        )
    machine: Machine | None = None
    if chosen.profile == MEASURED:
        if acceptance is not None:
            raise UserError(
                "profile=measured measures models, and a law or record has none: use model=hf or"
                " tiny, or the profile that `specdec profile` has written"
            )
    else:
        name = None if acceptance is None else acceptance.draft_name
        machine = machine_of(chosen, extra, draft_name=name)
    if chosen.check == "true" and acceptance is not None:
        raise UserError(
            "check=true runs models, and a law or record has none: give check=DIR, the folder of a"
            " run of the planned strategy"
        )
    if chosen.check not in ("", "false") and chosen.batch[0] > 1:
        raise UserError(
            f"check={chosen.check} compares one request at a time, and batch={chosen.batch[0]} was"
            " planned: plan with batch=1"
        )
    if chosen.check not in ("", "true", "false"):
        units_of_run(Path(chosen.check).expanduser())
    return Planning(chosen, tuple(rest), tuple(extra), config, machine, acceptance, job.output_dir)
