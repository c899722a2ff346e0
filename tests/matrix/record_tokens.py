"""Records the tokens of every preset, and the configuration that each is composed to.

    python -m tests.matrix.record_tokens                (everything)
    python -m tests.matrix.record_tokens t06 rejection  (these samplings; the others stay)

writes ``recorded_tokens.json``, which ``test_recorded_tokens.py`` compares with the present code.
Greedy tokens never change. Sampled ones change with the random numbers: then they are recorded
again by the second command.

``references`` has the tokens of plain decoding, by sampling. Of a preset's runs (`RUNS`)
there is "=" where all tokens are those of the reference, a hash of the tokens where they are not
(rejection, other weights, lossy verifiers), and "refused" where the combination is. ``configs`` has
what a preset's composed configuration adds to or changes in that of ``ar``, without class paths.
"""

import hashlib
import json
import sys
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from specdec.config.job import run_job_of
from specdec.config.options import flatten
from specdec.errors import UserError
from specdec.pairs import ModelPair, build_pair
from specdec.runs.runners import PartsRunner
from specdec.state import StopRules
from tests.matrix.cells import NUM_LAYERS, PROMPTS, base, constructed
from tests.matrix.record_presets import PROFILE, presets

FILE = Path(__file__).with_name("recorded_tokens.json")
COMMAND = "python -m tests.matrix.record_tokens"
SAMPLINGS = ("greedy", "t06", "rejection")
SEED = 7  # of the jobs and of the random models
EXECUTORS = ("own", "local", "pipeline", "early_exit", "tensor_parallel")
MAX_NEW_TOKENS = {"random": 12, "tiny": 6}
SMALL = {
    "stages": NUM_LAYERS - 1,
    "replicas": 2,
    "target_degree": 2,
    "draft_degree": 1,
    "groups": None,
}
"""Keys of executors, where they have them and they are not null."""
VARIANTS: dict[str, dict[str, Any]] = {
    "dense": {"attention": "dense"},
    "exact": {"exact": True},
    "replay": {"graphs": "replay"},
    "packed": {"kernels": "packed", "dtype": "float32"},
}
"""Ways to run the random models: keys of ``model``."""


@dataclass(frozen=True, slots=True)
class Run:
    """How a preset is run.

    Attributes:
        sampling: an option of ``sampling=``; ``rejection`` is ``t06`` with that verifier.
        executor: an option of ``executor=``, or ``own``: the preset's.
        model: a key of ``VARIANTS``, or ``tiny``.
        processes: whether the ranks are processes.
    """

    sampling: str
    executor: str
    model: str = "dense"
    processes: bool = False

    def __str__(self) -> str:
        ways = f"{self.executor}{' processes' * self.processes}"
        return f"{self.sampling} {self.model} {ways}"


RUNS = (
    *(Run(s, executor) for s in SAMPLINGS for executor in EXECUTORS),
    *(Run(s, "own", model) for s in SAMPLINGS[:2] for model in (*list(VARIANTS)[1:], "tiny")),
    *(Run(s, x, "dense", True) for s in SAMPLINGS[:2] for x in EXECUTORS if x != "local"),
)


def composed(preset: str, run: Run) -> dict[str, Any]:
    """The resolved configuration of a preset's run.

    Raises:
        UserError: the combination is refused.
    """
    words = [f"strategy={preset}", f"seed={SEED}"]
    words += [f"executor={run.executor}"] * (run.executor != "own")
    words += ["sampling=t06", "verifier=rejection"]
    if run.sampling != "rejection":
        words[-2:] = [f"sampling={run.sampling}"]
    if run.model == "tiny":
        words += ["model=tiny"]
    else:
        words += ["model=random", "model.middle_layers=1"]
    if not run.processes:
        words += ["clock=simulated", f"clock.profile={PROFILE}"]
    config = run_job_of(words).config
    if run.model != "tiny":
        config["model"].update(base()["model"], seed=SEED, **VARIANTS[run.model])
    for key, value in SMALL.items():
        if config["executor"].get(key) is not None:
            config["executor"][key] = value
    if run.processes and "transport" not in config["executor"]:
        raise UserError("this executor has one device")
    if run.processes:
        config["executor"]["transport"] = "distributed"
    config.update(batch_size=2, prefill_chunk=4, threads=1)
    return config


@cache
def pair_of(model: str) -> ModelPair:
    """The models of a section ``model`` as JSON, which all runs share."""
    return build_pair(json.loads(model))


def tokens(preset: str, run: Run) -> str:
    """The tokens of the prompts in order, or "refused"."""
    try:
        config = composed(preset, run)
        models = pair_of(json.dumps(config["model"]))
        stop = StopRules(max_new_tokens=MAX_NEW_TOKENS["tiny" if run.model == "tiny" else "random"])
        with constructed():
            ready = PartsRunner(cfg=config, pair=models, stop=stop)
    except UserError:
        return "refused"
    outputs: dict[int, str] = {}
    try:
        ready.run(PROMPTS, lambda result: outputs.update({result.id: numbers(result.output)}))
    finally:
        ready.close()
    return ", ".join(outputs[prompt.id] for prompt in PROMPTS)


def numbers(output: Sequence[int]) -> str:
    return " ".join(map(str, output))


def outcome(preset: str, run: Run, references: dict[str, str]) -> str:
    """What the file has of a run."""
    found = tokens(preset, run)
    if found == references[reference_of(run)]:
        return "="
    return found if found == "refused" else hashlib.sha256(found.encode()).hexdigest()[:8]


def reference_of(run: Run) -> str:
    """The key of the run's tokens in plain decoding."""
    sampling = "greedy" if run.sampling == "greedy" else "t06"
    return f"{sampling} {'tiny' if run.model == 'tiny' else 'random'}"


def references(samplings: Sequence[str]) -> dict[str, str]:
    """The tokens of ``ar`` on one device, in full."""
    runs = [run for run in RUNS if run.sampling in samplings and run.executor == "own"]
    plain = [run for run in runs if run.model in ("dense", "tiny") and not run.processes]
    return {reference_of(run): tokens("ar", run) for run in plain if run.sampling != "rejection"}


def configs() -> dict[str, dict[str, Any]]:
    """Preset -> the differences of its configuration from that of ``ar``, whose own is whole."""
    found = {}
    for preset in presets():
        # What pipespec and translated need; the bundled target has no MTP layer.
        own = {"mtp": "model=random", "translated": "model.translated=bundled:draft"}
        model = own.get(preset, "model.middle=bundled:draft")
        values, plain = _flat(preset, model), _flat("ar", model)
        found[preset] = {k: v for k, v in values.items() if preset == "ar" or v != plain.get(k, "")}
    return found


@cache
def _flat(preset: str, model: str) -> dict[str, Any]:
    plain = json.loads(json.dumps(deepcopy(run_job_of([f"strategy={preset}", model]).config)))
    return {key: v for key, v in flatten(plain).items() if not key.endswith("_target_")}


def read() -> dict[str, Any]:
    """The records; empty without the file."""
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}


def main(samplings: Sequence[str]) -> None:
    torch.set_num_threads(1)
    found = read()
    recorded = found.setdefault("runs", {})
    found["references"] = {**found.get("references", {}), **references(samplings or SAMPLINGS)}
    if not samplings:
        found["configs"] = configs()
    for preset in presets():
        old = recorded.get(preset, {})
        recorded[preset] = {
            str(run): outcome(preset, run, found["references"])
            if not samplings or run.sampling in samplings
            else old[str(run)]
            for run in RUNS
        }
        changed = [key for key, value in recorded[preset].items() if old.get(key) != value]
        print(f"{preset}: {len(changed)} changed", *(changed if old else []), sep="\n    ")
        FILE.write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
